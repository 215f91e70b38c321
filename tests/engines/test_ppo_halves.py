"""One half of PPO at a time, with real engines: a run that trains on kept rollouts alone has the losses of the run
that kept them, and one that only samples keeps the same rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config import PPO, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import SHARE, common, finish, write_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LENGTH = "def length(responses): return [len(response) % 7 for response in responses]\n"
SAME = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/ratio",
    "kl/mean",
    "reward/mean",
    "tokens",
)


def prepare(folder: Path, material: Path, **fields: Any) -> Path:
    (folder.parent / "checks.py").write_text(LENGTH)
    how = {
        "advantage_estimator": "grpo",
        "reward": {"function": f"{folder.parent / 'checks.py'}:length", "normalize": "running"},
        "max_steps": 2,
        "save_steps": 0,
        "logging_steps": 1,
        "export_at": (),
        "actor_ranks": Ranks(cpus=SHARE),
    }
    write_request(folder, PPO(**{**common(material), **how, **fields}), {"base": str(material / "base")})
    return folder


def test_training_on_kept_rollouts_has_the_losses_of_the_run(material: Path, tmp_path: Path) -> None:
    whole = prepare(tmp_path / "whole", material, keep_rollouts=True)
    finish(whole)
    kept = whole / "kept_rollouts"
    again = prepare(tmp_path / "again", material, train_only=str(kept))
    finish(again)
    log = (again / "log.txt").read_text()
    assert "sampler" not in log and "actor is up" in log
    lines, found = read_metrics(whole), read_metrics(again)
    assert len(lines) == len(found) == 2
    for line, other in zip(lines, found, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx(
            {name: line[name] for name in SAME}, rel=1e-4, abs=1e-6
        )
        assert not {name for name in other if name.startswith(("sync/", "rollout/age", "phase/sync"))}
    assert lines[0]["policy/loss"] != lines[1]["policy/loss"] and lines[0]["policy/grad_norm"] > 0
    weights, same = (load_file(run / "checkpoint" / "model.safetensors") for run in (whole, again))
    for name, values in weights.items():
        torch.testing.assert_close(same[name], values, rtol=1e-3, atol=1e-5)
    (result,) = (json.loads((again / "result.json").read_text()),)
    assert result["metrics"]["iterations"] == 2

    sampled = prepare(tmp_path / "sampled", material, rollouts_only=True, max_steps=1)
    finish(sampled)
    (line,) = read_metrics(sampled)
    assert line["reward/mean"] == pytest.approx(lines[0]["reward/mean"])
    assert not {name for name in line if name.startswith(("policy/", "sync/"))}
    first, same_first = (
        [json.loads(row)["tokens"] for row in file.read_text().splitlines()[1:]]
        for file in (kept / "iteration1.jsonl", sampled / "kept_rollouts" / "iteration1.jsonl")
    )
    assert first == same_first
    start, untouched = (
        load_file(folder / "model.safetensors") for folder in (material / "base", sampled / "checkpoint")
    )
    assert all(torch.equal(untouched[name], values) for name, values in start.items())
