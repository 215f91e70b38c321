"""Several teachers of one policy, by row, with all engines: the KL to each falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PPO, SFT, Data, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.engines.test_ppo import SHARE, common, finish, write_request
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LETTERS = {"first": "a", "second": "z"}


def teacher(letter: str, material: Path, folder: Path) -> Path:
    """Returns a model that repeats one letter, after SFT of the base."""
    folder.mkdir()
    rows = [json.loads(line) for line in (material / "prompts.jsonl").read_text().splitlines()][:64]
    told = [{"prompt": row["prompt"], "response": " ".join([letter] * 8)} for row in rows]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    sft = SFT(
        model="base",
        data=Data(sources=str(folder / "sft.jsonl")),
        max_len=96,
        max_epochs=8,
        train_batch_size=32,
        micro_train_batch_size=16,
        learning_rate=1e-3,
        ranks=Ranks(cpus=1),
    )
    RunDir(folder / "sft").prepare(stage_request(sft, material / "base", seed=3))
    finish(folder / "sft")
    return folder / "sft" / "checkpoint"


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"teacher_top_k": 20, "kl_in": "loss"}, marks=pytest.mark.long)]
)
def test_the_kl_of_each_row_to_its_own_teacher_falls(
    how: dict[str, Any], material: Path, tmp_path: Path
) -> None:
    """Prompts begin with their teacher's name, so that one policy can follow both."""
    rows = [json.loads(line) for line in (material / "prompts.jsonl").read_text().splitlines()][:64]
    names = [list(LETTERS)[i % 2] for i in range(len(rows))]
    lines = [{"prompt": name, "teacher": name} for name in names]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = {"base": str(material / "base")}
    for name, letter in LETTERS.items():
        inputs[name] = str(teacher(letter, material, tmp_path / name))
    fields = {
        **common(material),
        "prompts": Data(sources=str(tmp_path / "prompts.jsonl")),
        "reference": "base",
        "teachers": {name: {"model": name} for name in LETTERS},
        "advantage_estimator": "reinforce_pp",
        "gamma": 0,
        "whiten_advantages": False,
        "reward": "none",
        "init_kl_coef": 1.0,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 4,
        "train_batch_size": 64,
        "micro_train_batch_size": 32,
        "max_epochs": 1,
        "export_at": (),
        "max_steps": 10,
        "num_episodes": 50,
        "actor_ranks": Ranks(cpus=SHARE),
        **how,
    }
    write_request(tmp_path / "run", PPO(**fields), inputs)
    finish(tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    for name in LETTERS:
        found = [line[f"kl/teacher/{name}"] for line in metrics if f"kl/teacher/{name}" in line]
        assert min(found[-3:]) > 0 and sum(found[-3:]) < 0.8 * sum(found[:3]), (name, found)
    assert not any("work/reference/score" in line for line in metrics), "no row uses the reference"
