"""PPO on Ray with engines of transformers, for a family whose new weights vLLM does not take (gpt-oss)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import PPO, Data, EngineConfig, Ranks
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.families import make_family
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ITERATIONS = 3
REWARD = "def short(responses): return [-float(len(response)) for response in responses]\n"
# whole batches of prompts, and requests one by one
WAYS: dict[str, dict[str, Any]] = {"together": {}, "one by one": {"dynamic_filtering": True}}


@pytest.mark.parametrize("way", ["together", pytest.param("one by one", marks=pytest.mark.long)])
def test_ppo_trains_a_family_that_vllm_does_not_sample(way: str, material: Path, tmp_path: Path) -> None:
    base = make_family("gpt-oss", material / "base", tmp_path / "base")
    (tmp_path / "reward.py").write_text(REWARD)
    config = PPO(
        actor="base",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        reward={"function": f"{tmp_path / 'reward.py'}:short"},
        advantage_estimator="grpo",
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        train_batch_size=16,
        micro_train_batch_size=4,
        max_steps=ITERATIONS,
        prompt_max_len=64,
        generate_max_len=12,
        actor_learning_rate=1e-2,
        timeout=900,
        actor_ranks=Ranks(cpus=0.25),
        reference_ranks=Ranks(cpus=0.25),
        engine=EngineConfig(kind="transformers", num_engines=2, cpus=0.25),
        **WAYS[way],
    )
    run = RunDir(tmp_path / "run")
    run.prepare(stage_request(config, base, seed=7))
    command = [sys.executable, "-m", "rlhf_core", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = [line for line in read_metrics(run) if "sampler/gap" in line]
    assert len(lines) == ITERATIONS
    for line in lines:
        assert line["sampler/gap"] <= 1e-5 and line["sync/probe_gap"] <= 1e-5
    assert any(line["policy/grad_norm"] > 0 for line in lines), "the weights that arrived were new"
