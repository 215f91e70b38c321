"""GPUs together: ZeRO-3 ranks train what one GPU trains, and PPO learns wherever its models stand. What lacks
GPUs is skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.config import (
    DPO,
    KTO,
    PPO,
    SFT,
    Data,
    EngineConfig,
    Preferences,
    Ranks,
    RewardModel,
    StageConfig,
)
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.stage_request import stage_request

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.skipif(not GPUS, reason="no GPU here")]
TRAIN = dict(dtype="bfloat16", train_batch_size=32, micro_train_batch_size=4, max_len=96, learning_rate=1e-4)
# A third of the letters that a model without training writes are in it.
EARLY = (
    "def early(responses): return [sum(c in 'abcdefghijklm' for c in text) / max(1, len(text)) for text in"
    " responses]\n"
)
ROLES = ("actor_ranks", "reference_ranks")


def of_gpus(*counts: int) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"{GPUS} GPUs here")) for n in counts]


def run(name: str, config: StageConfig, base: Path, folder: Path, **models: str) -> list[dict[str, float]]:
    RunDir(folder).prepare(stage_request(config, {"base": str(base), **models}, name=name))
    command = [sys.executable, "-m", "rlhf_core", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return read_metrics(folder)


def training(kind: str, material: Path, gpus: int, **more: Any) -> StageConfig:
    where = {"zero_stage": 3 if gpus > 1 else 0, "ranks": Ranks(num_ranks_per_node=gpus, gpus=1), **more}
    data = Data(
        sources=str(material / ("sft.jsonl" if kind == "sft" else "preferences.jsonl")), max_samples=192
    )
    if kind in ("sft", "reward_model"):
        return {"sft": SFT, "reward_model": RewardModel}[kind](model="base", data=data, **TRAIN, **where)
    return {"dpo": DPO, "kto": KTO}[kind](policy="base", data=data, **TRAIN, **where)


@pytest.mark.parametrize("gpus", of_gpus(2, 4))
@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_zero3_ranks_train_what_one_gpu_trains(kind: str, gpus: int, material: Path, tmp_path: Path) -> None:
    one, several = (
        run(kind, training(kind, material, n), material / "base", tmp_path / str(n)) for n in (1, gpus)
    )
    assert len(one) == len(several) >= 6
    for a, b in zip(one, several, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.01), a["step"]  # bf16 carries three digits
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1), a["step"]
    checkpoint = tmp_path / str(gpus) / "checkpoint"
    exported = load_file(checkpoint / "model.safetensors")
    auto = AutoModelForSequenceClassification if kind == "reward_model" else AutoModelForCausalLM
    loaded = auto.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in exported.items()), (
        "export and transformers disagree"
    )


@pytest.mark.parametrize("gpus", of_gpus(2, 4))
@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_gpus_compute_each_pass_together_as_one_does(
    kind: str, gpus: int, material: Path, tmp_path: Path
) -> None:
    packed = {"micro_train_tokens": 384}
    alone = training(kind, material, 1, **packed)
    together = training(kind, material, gpus, **packed, sequence_parallel_size=gpus)
    one = run(kind, alone, material / "base", tmp_path / "1")
    several = run(kind, together, material / "base", tmp_path / "2")
    assert len(one) == len(several) >= 6
    for a, b in zip(one, several, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.01), a["step"]  # bf16 carries three digits
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1), a["step"]


@pytest.mark.parametrize("gpus", of_gpus(2, 4))
def test_a_round_is_sampled_and_scored_on_all_gpus(gpus: int, material: Path, tmp_path: Path) -> None:
    run("reward_model", training("reward_model", material, 1), material / "base", tmp_path / "rm")
    config = Preferences(
        policy="base",
        reward="rm",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        num_prompts=64,
        prompt_max_len=64,
        generate_max_len=24,
        dtype="bfloat16",
        engine=EngineConfig(num_engines=gpus, gpus=1, gpu_memory_utilization=0.4),
    )
    (line,) = run(
        "preferences", config, material / "base", tmp_path / "run", rm=str(tmp_path / "rm" / "checkpoint")
    )
    assert line["prompts"] == 64
    assert line["pairs"] > 16
    assert line["reward/best"] > line["reward/mean"] > line["reward/worst"]


def ppo(material: Path, function: Path, placement: str) -> PPO:
    """Actor, reference and engine on one GPU, on two apart, or on all of two together: an engine on each, or
    one over both, by tensors (`split`) or by layers (`stages`)."""
    engines: dict[str, dict[str, int]] = {
        "together": {"num_engines": 2},
        "split": {"tensor_parallel_size": 2},
        "stages": {"pipeline_parallel_size": 2},
    }
    everywhere = placement in engines
    gpus = 2 if everywhere else 1
    share = {"one": 0.2, "apart": 0.4}.get(placement, 1.0)
    ranks = Ranks(num_ranks_per_node=gpus, gpus=share)
    engine = (
        EngineConfig(gpus=1.0) if placement == "apart" else EngineConfig(gpus=0.4, gpu_memory_utilization=0.4)
    )
    if everywhere:
        engine = EngineConfig(gpus=1.0, gpu_memory_utilization=0.4, sleep=True, **engines[placement])  # type: ignore[arg-type]
    return PPO(
        actor="base",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        reward=f"{function}:early",
        advantage_estimator="grpo",
        dtype="bfloat16",
        zero_stage=3 if everywhere else "auto",
        colocate_all=everywhere,
        rollout_batch_size=16,
        n_samples_per_prompt=4,
        train_batch_size=32,
        micro_train_batch_size=16,
        max_steps=24,
        num_episodes=24,
        max_epochs=1,
        min_lr_ratio=1,
        prompt_max_len=64,
        generate_max_len=16,
        actor_learning_rate=1e-3,
        engine=engine,
        **dict.fromkeys(ROLES, ranks),
    )


PLACEMENTS = {"one": 1, "apart": 2, "together": 2, "split": 2, "stages": 2}  # GPUs


@pytest.mark.parametrize(
    "placement", [pytest.param(name, marks=of_gpus(n)[0].marks) for name, n in PLACEMENTS.items()]
)
def test_ppo_raises_its_reward(placement: str, material: Path, tmp_path: Path) -> None:
    """Each process of an engine compares the checksum of the weights on its GPU with the sender's, and ends
    the run where they differ."""
    (tmp_path / "checks.py").write_text(EARLY)
    lines = run("ppo", ppo(material, tmp_path / "checks.py", placement), material / "base", tmp_path / "run")
    first, last = (
        np.array([(line["reward/mean"], line["reward/std"]) for line in part])
        for part in (lines[:4], lines[-4:])
    )
    # of the difference of two means of 4 x 64 answers
    error = np.sqrt(sum((part[:, 1] ** 2).mean() for part in (first, last)) / (4 * 64))
    assert last[:, 0].mean() - first[:, 0].mean() > 4 * error, [line["reward/mean"] for line in lines]
    for line in lines:
        assert line["policy/first_ratio_gap"] < 0.01 and line["sampler/gap"] < 0.02, line["step"]
