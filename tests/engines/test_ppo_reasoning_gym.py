"""GRPO on questions of reasoning-gym, with all engines: the scores are the package's, each task has its
metrics, and the score rises."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, SFT, Data, EngineConfig, Ranks
from rlhf_core.config.kinds import metrics_of
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.environments import sandbox
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.stages.ppo.train import means_of_run
from tests.engines.test_ppo import SHARE, finish, write_request
from tests.support.stage_request import stage_request

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make setup-dev")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not sandbox.available(), reason="no bubblewrap works here"),
]
ONE_ANIMAL = dict.fromkeys(("min_animals", "max_animals", "min_instances", "max_instances"), 1)
LEGS = {"tasks": {"leg_counting": ONE_ANIMAL}, "size": 200, "instruction": ""}
WHOLE = {"verifier": "reasoning_gym", "tag": None}
ITERATIONS = 30
BATCH = 32
SAMPLES = 8


def ppo(**fields: Any) -> PPO:
    share = Ranks(cpus=SHARE)
    sizes = {
        "prompt_max_len": 192,
        "micro_train_batch_size": 8,
        "micro_rollout_batch_size": 8,
        "max_epochs": 1,
        "num_episodes": 100,
    }
    how = {
        "actor": "base",
        "advantage_estimator": "grpo",
        "init_kl_coef": 0.0,
        "actor_learning_rate": 1e-3,
        "actor_ranks": share,
        "engine": EngineConfig(cpus=SHARE, kv_cache_gib=0.5),
        "timeout": 200,
    }
    return PPO.model_validate({**sizes, **how, **fields})


def test_two_iterations_on_two_tasks(material: Path, tmp_path: Path) -> None:
    prompts = {"sources": {"reasoning_gym": {"tasks": {"leg_counting": ONE_ANIMAL, "gcd": {}}, "size": 8}}}
    held_out = {"sources": {"reasoning_gym": {"tasks": ["leg_counting", "gcd"], "size": 4, "seed": 1}}}
    config = ppo(
        prompts=prompts,
        eval_prompts=held_out,
        eval_right=1,
        eval_steps=2,
        reward=WHOLE,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        generate_max_len=16,
        max_steps=2,
    )
    write_request(tmp_path / "ppo", config, {"base": str(material / "base")})
    finish(tmp_path / "ppo")
    lines = read_metrics(tmp_path / "ppo")
    assert len(lines) == 2
    for line in lines:
        for task in ("leg_counting", "gcd"):
            assert 0 <= line[f"task/{task}/right"] <= line[f"task/{task}/reward"] <= 1
            assert 0 < line[f"task/{task}/length"] <= 16
        both = (line["task/leg_counting/reward"] + line["task/gcd/reward"]) / 2
        assert line["reward/mean"] == pytest.approx(both) and line["reward/reasoning_gym/failed"] == 0
    of_tasks = {name for name in means_of_run(RunDir(tmp_path / "ppo")) if name.startswith("task/")}
    assert len(of_tasks) == 6 and of_tasks <= set(metrics_of(config))
    result = json.loads((tmp_path / "ppo" / "result.json").read_text())["metrics"]
    assert 0 <= result["eval/leg_counting/right/mean"] <= 1 and "eval/gcd/reward/mean" in result


@pytest.mark.long
def test_the_score_rises(material: Path, tmp_path: Path) -> None:
    """After an SFT on questions with random numbers of legs as their answers."""
    rows = load_rows(
        Data.model_validate({"sources": {"reasoning_gym": {**LEGS, "seed": 5, "size": 2000}}}), 0
    )
    rng = random.Random(0)
    numbers = sorted({row["answer"] for row in rows})
    assert numbers == sorted(map(str, (0, 2, 4, 5, 6, 8, 10, 14)))
    talks = [[*row["prompt"], {"role": "assistant", "content": rng.choice(numbers)}] for row in rows]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sft = SFT(
        data=Data(sources=str(tmp_path / "talks.jsonl")),
        model="base",
        max_len=224,
        train_batch_size=32,
        micro_train_batch_size=16,
        learning_rate=3e-3,
        ranks=Ranks(cpus=1),
    )
    request = stage_request(sft, material / "base", seed=3)
    RunDir(tmp_path / "sft").prepare(request)
    finish(tmp_path / "sft")
    config = ppo(
        prompts={"sources": {"reasoning_gym": LEGS}},
        reward=WHOLE,
        rollout_batch_size=BATCH,
        n_samples_per_prompt=SAMPLES,
        train_batch_size=64,
        generate_max_len=6,
        max_steps=ITERATIONS,
    )
    write_request(tmp_path / "ppo", config, {"base": str(tmp_path / "sft" / "checkpoint")})
    finish(tmp_path / "ppo")
    lines = read_metrics(tmp_path / "ppo")
    first, last = (
        np.array([(line["task/leg_counting/reward"], line["reward/std"]) for line in part])
        for part in (lines[:5], lines[-5:])
    )
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (5 * BATCH * SAMPLES))
    assert last[:, 0].mean() - first[:, 0].mean() > 5 * error
