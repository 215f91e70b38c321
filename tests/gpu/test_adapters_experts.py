"""Adapters, 4-bit weights and experts on one GPU in bf16: they train, and vLLM follows the actor."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config import DPO, PPO, SFT, Data, EngineConfig, Lora, Ranks, StageConfig
from rlhf_core.data.documents import Document
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights
from rlhf_core.models.checkpoint.save import save_model
from rlhf_core.models.load_model import load_policy, trained_policy
from rlhf_core.models.lora import lora_layers
from rlhf_core.models.policy import Policy
from rlhf_core.objectives.collate import collate
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.training.engine import AdamW, TorchEngine
from tests.support.families import make_family
from tests.support.stage_request import stage_request
from tests.support.tiny_models import reward_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes here"
)
NF4 = Lora(rank=8, quantize="nf4")


def run(name: str, config: StageConfig, inputs: dict[str, str], folder: Path) -> list[dict[str, float]]:
    RunDir(folder).prepare(stage_request(config, inputs, name=name))
    command = [sys.executable, "-m", "rlhf_core", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    if done.returncode:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return read_metrics(folder)


def ppo(material: Path, **more: object) -> PPO:
    share = Ranks(gpus=0.2)
    return PPO(
        actor="base",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        reward="reward",
        dtype="bfloat16",
        advantage_estimator="rloo",
        rollout_batch_size=16,
        n_samples_per_prompt=2,
        train_batch_size=32,
        micro_train_batch_size=16,
        max_steps=3,
        prompt_max_len=64,
        generate_max_len=24,
        actor_learning_rate=1e-3,
        actor_ranks=share,
        reference_ranks=share,
        reward_ranks=share,
        engine=EngineConfig(gpus=0.3, gpu_memory_utilization=0.3),
        **more,
    )


def logprobs(policy: Policy) -> torch.Tensor:
    documents = [[5, 9, 20, 33, 40, 51, 7], [8, 8, 9, 10, 77, 81]]
    batch = collate([[Document(d, [False] * len(d))] for d in documents], pad_token_id=0).to("cuda")
    with torch.no_grad():
        return policy(batch.tokens, batch.positions, batch.documents).logprobs


@needs_bitsandbytes
@pytest.mark.parametrize(("kind", "zero_stage"), [("sft", 0), ("sft", 2), ("dpo", 1)])
def test_4_bit_weights_train(kind: str, zero_stage: int, material: Path, tmp_path: Path) -> None:
    fields = {
        "dtype": "bfloat16",
        "lora": NF4,
        "zero_stage": zero_stage,
        "train_batch_size": 32,
        "micro_train_batch_size": 8,
        "max_len": 96,
    }
    config: SFT | DPO
    if kind == "sft":
        config = SFT(
            model="base", data=Data(sources=str(material / "sft.jsonl")), learning_rate=5e-3, **fields
        )
    else:
        config = DPO(
            policy="base",
            data=Data(sources=str(material / "preferences.jsonl")),
            learning_rate=1e-3,
            **fields,
        )
    lines = run(kind, config, {"base": str(material / "base")}, tmp_path / kind)
    assert lines[-1]["loss"] < lines[0]["loss"]
    stored, base = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / kind / "checkpoint", material / "base")
    )
    assert stored.keys() == base.keys()
    assert all(weight.shape == base[name].shape for name, weight in stored.items())


@needs_bitsandbytes
def test_what_is_exported_of_4_bit_weights_is_what_was_trained(material: Path, tmp_path: Path) -> None:
    policy = trained_policy(str(material / "base"), "bfloat16", False, NF4, seed=0)
    with torch.no_grad():
        for layer in lora_layers(policy.model).values():
            layer.lora_B["default"].weight.normal_(std=0.05)
    engine = TorchEngine(policy, AdamW((0.9, 0.95), 0.0, 1.0))
    save_model(
        policy.model, checkpoint_weights(policy.model, engine.gathered), str(material / "base"), tmp_path
    )
    expected = logprobs(policy)
    plain = logprobs(load_policy(str(material / "base"), "bfloat16").cuda())
    exported = logprobs(load_policy(str(tmp_path), "bfloat16").cuda())
    assert (exported - expected).abs().mean() < 0.05 < (plain - expected).abs().mean()


@needs_bitsandbytes
def test_vllm_follows_an_actor_of_4_bit_weights_with_adapters(material: Path, tmp_path: Path) -> None:
    inputs = {"base": str(material / "base"), "reward": str(reward_model(material / "base", tmp_path / "rm"))}
    lines = run("ppo", ppo(material, lora=NF4, zero_stage=2), inputs, tmp_path / "ppo")
    for line in lines:
        assert line["policy/first_ratio_gap"] < 0.01
    # the first rollout is of the model before it was quantised
    assert all(line["sampler/gap"] < 0.05 for line in lines[1:])


@pytest.mark.parametrize("memory", ["", "expandable_segments:True"])
def test_an_engine_that_slept_samples_from_the_actor(
    memory: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", memory)
    inputs = {"base": str(material / "base"), "reward": str(reward_model(material / "base", tmp_path / "rm"))}
    awake = EngineConfig(gpus=0.3, gpu_memory_utilization=0.3)
    curves = [
        run("ppo", ppo(material).model_copy(update={"engine": vllm}), inputs, tmp_path / name)
        for name, vllm in (("awake", awake), ("sleeping", awake.model_copy(update={"sleep": True})))
    ]
    for a, b in zip(*curves, strict=True):
        assert b["phase/sleep"] > 0 and b["phase/wake"] > 0 and "phase/sleep" not in a
        assert b["sampler/gap"] < 0.05 and b["policy/first_ratio_gap"] < 0.01
    assert curves[0][0]["policy/loss"] == pytest.approx(curves[1][0]["policy/loss"], abs=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3-moe"])
def test_vllm_follows_the_actor_of_each_family(family: str, material: Path, tmp_path: Path) -> None:
    base = make_family(family, material / "base", tmp_path / "base")
    more = {"lora": Lora(rank=8), "zero_stage": 2} if family == "mixtral" else {"zero_stage": 3}
    inputs = {"base": str(base), "reward": str(reward_model(material / "base", tmp_path / "rm"))}
    for line in run("ppo", ppo(material, **more), inputs, tmp_path / "ppo"):
        assert line["policy/first_ratio_gap"] < 0.01
        assert line["sampler/gap"] < 0.05
