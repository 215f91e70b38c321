"""A curriculum with real engines: a killed run draws the prompts of an undisturbed one, and what it knows of them
goes on from its state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import PPO, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from tests.engines.test_ppo import ODD, SAVED, SHARE, common, finish, kill_past_checkpoint, write_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NAMES = ("curriculum/mean_pass_rate", "curriculum/solved", "curriculum/unseen")


def prepare(folder: Path, material: Path) -> Path:
    (folder.parent / "checks.py").write_text(ODD)
    how = {
        "advantage_estimator": "grpo",
        "init_kl_coef": 0.0,
        "reward": {"function": f"{folder.parent / 'checks.py'}:odd"},
        "curriculum": {"right": 1.0},
        "keep_rollouts": True,
        "logging_steps": 1,
        "export_at": (),
        "actor_ranks": Ranks(cpus=SHARE),
    }
    write_request(folder, PPO(**{**common(material), **how}), {"base": str(material / "base")})
    return folder


def prompts_of(run: Path, iteration: int) -> list[int]:
    head = (run / "kept_rollouts" / f"iteration{iteration}.jsonl").read_text().splitlines()[0]
    numbers: list[int] = json.loads(head)["prompts"]
    return numbers[::2]


def test_a_killed_run_draws_the_same_prompts(material: Path, tmp_path: Path) -> None:
    whole, killed = (prepare(tmp_path / name, material) for name in ("whole", "killed"))
    finish(whole)
    kill_past_checkpoint(killed)
    finish(killed)
    assert "resumed after iteration" in (killed / "log.txt").read_text()
    for number in range(1, SAVED + 2):
        assert prompts_of(killed, number) == prompts_of(whole, number)
        assert len(set(prompts_of(whole, number))) == 8
    lines, found = read_metrics(whole), read_metrics(killed)
    assert len(lines) == len(found) == 4
    for line, other in zip(lines[: SAVED + 1], found, strict=False):
        assert {name: other[name] for name in NAMES} == pytest.approx({name: line[name] for name in NAMES})
    unseen = [line["curriculum/unseen"] for line in lines]
    assert 1 > unseen[0] > unseen[-1] and unseen[0] == pytest.approx(1 - 8 / 300)
