"""PPO with adapters on a mixture of experts: what vLLM samples from is the actor with its adapters, after
every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

import rlhf_core.stages.ppo.ppo_stage
import rlhf_core.stages.reward_model
from rlhf_core.config import PPO, Data, EngineConfig, Lora, Ranks
from rlhf_core.config.metrics.shared_metrics import SURVIVES
from rlhf_core.models.load_model import load_policy
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir
from tests.support.families import make_family
from tests.support.stage_request import stage_request
from tests.support.stage_work import train_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def reward_model(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reward_model(material, tmp_path_factory.mktemp("reward_model"))


@pytest.mark.parametrize(
    "family, estimator, fields",
    [
        ("mixtral", "grpo", {"lora": Lora(rank=4, export="adapter"), "zero_stage": 2}),
        (
            "qwen3",
            "grpo",
            {
                "lora": Lora(rank=3),
                "zero_stage": 3,
                "engine": EngineConfig(cpus=0.25, kv_cache_gib=0.5, adapters="alone"),
            },
        ),
        pytest.param("qwen3-moe", "rloo", {"router_aux_coef": 0.01, "zero_stage": 3}, marks=pytest.mark.long),
        pytest.param("qwen3", "gae", {"lora": Lora(rank=4), "zero_stage": 3}, marks=pytest.mark.long),
    ],
)
def test_the_sampler_follows_the_actor(
    family: str,
    estimator: str,
    fields: dict[str, object],
    material: Path,
    reward_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    base = make_family(family, material / "base", tmp_path / "base")
    share = Ranks(cpus=0.25)
    config = PPO(
        actor="base",
        prompts=Data(sources=str(material / "prompts.jsonl")),
        advantage_estimator=estimator,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=4,
        micro_rollout_batch_size=8,
        max_steps=3,
        prompt_max_len=64,
        generate_max_len=16,
        actor_learning_rate=1e-2,
        timeout=200,
        actor_ranks=share,
        critic_ranks=share,
        reference_ranks=share,
        reward_ranks=share,
        **{"engine": EngineConfig(cpus=0.25, kv_cache_gib=0.5), **fields},
    )
    inputs = {"base": str(base), "reward_model": str(reward_model)}
    (tmp_path / "ppo").mkdir()
    try:
        rlhf_core.stages.ppo.ppo_stage.run(
            stage_request(config, inputs, seed=7),
            RunDir(tmp_path / "ppo"),
        )
    finally:
        ray.shutdown()
    said = capfd.readouterr().out
    assert ("the reference is the actor without its adapters" in said) is (config.lora is not None)
    assert ("waiting for reference to load" in said) is (config.lora is None)
    assert (
        f"{'adapters' if config.engine.adapters == 'alone' else 'weights'} go to 1 engine processes" in said
    )
    lines = read_metrics(tmp_path / "ppo")
    # the probe after each sync compared vLLM with the actor; rollouts came from the synced weights
    for line in lines:
        assert line["sync/probe_gap"] < 1e-3 and line["sampler/gap"] < 1e-3
        assert line["policy/first_ratio_gap"] < 1e-5
    merged = config.lora is not None and config.engine.adapters == "merged"
    assert [line.get(SURVIVES) for line in lines] == [pytest.approx(1.0, abs=1e-3) if merged else None] * len(
        lines
    )
    assert lines[-1]["kl/mean"] != pytest.approx(0, abs=1e-3), (
        "the actor that was sampled from is still the reference"
    )
    checkpoint = tmp_path / "ppo" / "checkpoint"
    if config.lora is not None and config.lora.export == "adapter":
        assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            base
        )
        assert all(".lora_" in name for name in load_file(checkpoint / "adapter_model.safetensors"))
    before, after = (dict(load_policy(str(path)).model.named_parameters()) for path in (base, checkpoint))
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())
