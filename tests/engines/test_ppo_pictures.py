"""PPO on prompts with images: a critic and a reward model that see them, and engines of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

import rlhf_core.stages.reward_model
import rlhf_core.stages.sft
from rlhf_core.config import PPO, SFT, Data, EngineConfig, Ranks, RewardModel
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.pictured_models import asked, make_pictured, square, write_rows
from tests.support.pictured_pairs import PAIR, colour_pairs
from tests.support.stage_request import stage_request

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
ITERATIONS = 16
SHARE = 0.25  # of a CPU, for each role


def start_of(folder: Path, base: Path) -> Path:
    """A model that answers with one of two colours, whatever it sees."""
    rows = []
    for number in range(32):
        (folder / f"start{number}.png").write_bytes(square(PAIR[number % 2], 16 + number % 5, 16))
        image = {"type": "image", "image": f"start{number}.png"}
        rows.append(asked([image, {"type": "text", "text": "Colour?"}], PAIR[number // 2 % 2]))
    config = SFT(
        model="base",
        data=Data(sources=str(write_rows(folder / "chats.jsonl", rows))),
        train_batch_size=16,
        micro_train_batch_size=4,
        max_len=96,
        learning_rate=1e-2,
        max_epochs=8,
        dtype="float32",
    )
    (folder / "sft").mkdir()
    rlhf_core.stages.sft.run(stage_request(config, base, seed=3), RunDir(folder / "sft"))
    return folder / "sft" / "checkpoint"


def reward_model_of(folder: Path, base: Path) -> Path:
    """A model that prefers the colour that the image has."""
    config = RewardModel(
        model="base",
        data=colour_pairs(folder, 72),
        train_batch_size=8,
        micro_train_batch_size=4,
        max_len=96,
        learning_rate=3e-3,
        max_epochs=4,
        dtype="float32",
    )
    (folder / "reward").mkdir()
    rlhf_core.stages.reward_model.run(stage_request(config, base, seed=3), RunDir(folder / "reward"))
    return folder / "reward" / "checkpoint"


def test_ppo_learns_what_a_reward_model_sees(tmp_path: Path) -> None:
    base = make_pictured("qwen3_vl", tmp_path / "base", initializer_range=0.05)
    rows = []
    for number in range(24):
        (tmp_path / f"ask{number}.png").write_bytes(square(PAIR[number % 2], 16 + number % 5, 16))
        content = [{"type": "image", "image": f"ask{number}.png"}, {"type": "text", "text": "Colour?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "colour": PAIR[number % 2]})
    config = PPO(
        actor="base",
        prompts=Data(sources=str(write_rows(tmp_path / "asks.jsonl", rows))),
        reward="reward_model",
        rollout_batch_size=12,
        n_samples_per_prompt=8,
        train_batch_size=48,
        micro_train_batch_size=24,
        micro_rollout_batch_size=24,
        max_steps=ITERATIONS,
        num_episodes=ITERATIONS,
        prompt_max_len=64,
        generate_max_len=8,
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        timeout=900,
        dtype="float32",
        actor_ranks=Ranks(cpus=SHARE),
        critic_ranks=Ranks(cpus=SHARE),
        reference_ranks=Ranks(cpus=SHARE),
        reward_ranks=Ranks(cpus=SHARE),
        engine=EngineConfig(kind="transformers", cpus=SHARE),
    )
    run = RunDir(tmp_path / "run")
    models = {"base": str(start_of(tmp_path, base)), "reward_model": str(reward_model_of(tmp_path, base))}
    run.prepare(stage_request(config, models, seed=7))
    command = [sys.executable, "-m", "rlhf_core", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = [line for line in read_metrics(run) if "sampler/gap" in line]
    assert len(lines) == ITERATIONS
    for line in lines:
        assert line["sampler/gap"] <= 1e-5 and line["sync/probe_gap"] <= 1e-5
    assert all(line["value/grad_norm"] > 0 for line in lines)
    shown = [
        json.loads(row) for file in (run / "rollouts").iterdir() for row in file.read_text().splitlines()
    ]
    colour = {row["prompt"][0]["content"][0]["image"]: row["colour"] for row in rows}
    given: dict[bool, list[float]] = {True: [], False: []}
    for row in shown:
        if row["response"] in PAIR:
            is_right = row["response"] == colour[row["prompt"][0]["content"][0]["image"]]
            given[is_right].append(row["rewards"]["reward_model"])
    assert min(given[True]) > max(given[False]) + 1, "the reward model sees the images"
    means = [line["reward/mean"] for line in lines]
    assert fmean(means[-3:]) > fmean(means[:3]) + 1
