"""Frozen weights stay bit for bit, take no gradient and no optimiser state, and the rest is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rlhf_core.config import SFT
from rlhf_core.config.training.optimiser_fields import Freeze
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.training.engine import AdamW, TorchEngine
from tests.unit.training.test_training import config_of, run

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ADAMW = AdamW((0.9, 0.95), 0.1, 1.0)
FIRST = {"embeddings": True, "layers": 1}


def policy(tied: bool = False, dtype: torch.dtype = torch.float32) -> Policy:
    torch.manual_seed(0)
    return Policy(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)).to(dtype))


def frozen_names(module: Policy | Scorer, **fields: Any) -> set[str]:
    freeze_weights(module.model, Freeze.model_validate(fields))
    return {name for name, weight in module.model.named_parameters() if not weight.requires_grad}


def step(engine: TorchEngine, number: int) -> float:
    tokens = torch.arange(24).view(2, 12).roll(number, 1) % 31
    positions = torch.arange(12).expand(2, 12)
    found = engine(tokens, positions, torch.zeros_like(tokens))
    engine.backward(-found.logprobs.mean(), True)
    return engine.step(1e-2)


def test_embeddings_layers_and_patterns_name_their_weights() -> None:
    assert frozen_names(policy(), embeddings=True) == {"model.embed_tokens.weight"}
    first = frozen_names(policy(), layers=2)
    assert first == {
        name for name, _ in policy().model.named_parameters() if ".layers.0." in name or ".layers.1." in name
    }
    assert frozen_names(policy(), names=["*.mlp.up_proj.weight"]) == {
        f"model.layers.{k}.mlp.up_proj.weight" for k in range(3)
    }
    assert frozen_names(policy(), names="model.norm.weight") == {"model.norm.weight"}
    assert frozen_names(policy(), names=["model.norm.weight"]) == {"model.norm.weight"}
    assert frozen_names(policy(tied=True), names=["lm_head.weight"]) == {"model.embed_tokens.weight"}
    torch.manual_seed(0)
    scorer = Scorer(Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)))
    assert "score.weight" not in frozen_names(scorer, embeddings=True, layers=3)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"layers": 4}, r"freeze\.layers=4, and .* has 3 layers: lower it"),
        (
            {"names": ["*.q_prj.*"]},
            r"no weight of .* is called '\*\.q_prj\.\*'; its names are such as model\.",
        ),
        ({"names": ["*"]}, "leaves no weight of .* to train"),
        ({}, "freeze names nothing to freeze"),
    ],
)
def test_what_freezes_nothing_or_everything_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        frozen_names(policy(), **fields)


def test_a_critic_freezes_what_it_has() -> None:
    def critic(layers: int = 3) -> Qwen2ForSequenceClassification:
        shape = SHAPE | {"num_hidden_layers": layers, "num_labels": 1, "pad_token_id": 0}
        return Qwen2ForSequenceClassification(Qwen2Config(**shape))

    def frozen(model: Qwen2ForSequenceClassification, **fields: Any) -> set[str]:
        freeze_weights(model, Freeze.model_validate(fields), "critic")
        return {name for name, weight in model.named_parameters() if not weight.requires_grad}

    assert frozen(critic(), names=["lm_head.weight", "model.norm.weight"]) == {"model.norm.weight"}
    assert {name.split(".")[2] for name in frozen(critic(2), layers=3)} == {"0", "1"}
    with pytest.raises(ValueError, match=r"leaves no weight of the critic .* to train"):
        frozen(critic(), names=["*"])
    with pytest.raises(ValueError, match=r"freeze\.layers=4, and the actor .* has 3 layers"):
        freeze_weights(policy().model, Freeze(layers=4), "actor")


def test_layers_that_a_models_code_does_not_mark_are_frozen() -> None:
    class Unmarked(PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

    model = Unmarked()
    freeze_weights(model, Freeze(layers=2))
    assert [part.weight.requires_grad for part in model.blocks] == [False, False, True]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"lora": {}}, "freeze and lora"),
        ({"float8": True, "dtype": "bfloat16"}, "float8"),
        (
            {"deepspeed": {"zero_optimization": {"zero_quantized_nontrainable_weights": True}}},
            "would round the weights that freeze keeps unchanged:",
        ),
    ],
)
def test_freeze_is_refused_beside_what_trains_a_part_or_all(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SFT.model_validate({"data": {"sources": "rows.jsonl"}, "freeze": {"layers": 1}, **more})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [FIRST, {"layers": 3}, {"embeddings": True, "layers": 3, "names": ["model.norm.weight"]}]
)
def test_frozen_weights_have_no_gradient_and_no_optimiser_state(
    dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    module = policy(dtype=dtype)
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    frozen = {f"model.{name}" for name in frozen_names(module, **fields)}
    engine = TorchEngine(module, ADAMW)
    for number in range(3):
        assert step(engine, number) > 0
    for name, weight in module.named_parameters():
        assert torch.equal(weight, before[name]) is (name in frozen), name
        assert weight.grad is None
    assert set(engine._optimised) == set(before) - frozen
    assert len(engine._states()) == len(engine._optimised)


def test_a_state_without_the_frozen_weights_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    def made() -> TorchEngine:
        module = policy()
        freeze_weights(module.model, Freeze.model_validate(FIRST))
        return TorchEngine(module, ADAMW)

    whole = made()
    for number in range(2):
        step(whole, number)
    whole.save_state(tmp_path)
    whole.finish_saving()
    resumed = made()
    resumed.load_state(tmp_path)
    assert [step(whole, k) for k in (2, 3)] == [step(resumed, k) for k in (2, 3)]
    for one, other in zip(whole.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="another model"):
        TorchEngine(policy(), ADAMW).load_state(tmp_path)


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_a_stage_exports_all_weights_and_the_frozen_ones_are_those_of_its_start(
    kind: str, material: Path, tmp_path: Path
) -> None:
    more = {"gradient_checkpointing": True, "mlp_tokens": 16} if kind == "sft" else {}
    run(config_of(kind, material, samples=16, freeze=FIRST, **more), material, tmp_path)
    start = load_file(material / "base" / "model.safetensors")
    trained = load_file(tmp_path / "checkpoint" / "model.safetensors")
    common = {name for name in trained if name in start}
    assert len(common) >= len(start) - 1, "a reward model has another head"
    kept = {name for name in common if torch.equal(trained[name], start[name])}
    assert kept == {name for name in common if "embed_tokens" in name or ".layers.0." in name}
