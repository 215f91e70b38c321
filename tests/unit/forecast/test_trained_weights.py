"""The forecast of frozen weights and of Muon, against the bytes that an engine holds for a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from rlhf_core.config import DPO, SFT
from rlhf_core.config.training.optimiser_fields import Freeze
from rlhf_core.config.training.sharding import TORCH, Training
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.memory import CONTEXT, trained, training_of
from rlhf_core.forecast.trained_weights import layer_matrices, trained_weights
from rlhf_core.hub.model_config import size_of_config
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.models.weights.frozen_weights import freeze_weights
from rlhf_core.training.engine import AdamW, TorchEngine
from rlhf_core.training.muon import hidden_matrices
from tests.support.measured import H200, LARGE_MODEL, SMALL_MODEL

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FREEZES = [{}, {"embeddings": True}, {"layers": 2}, {"embeddings": True, "layers": 3}]


def policy(tied: bool) -> Policy:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    return Policy(LlamaForCausalLM(config).to(torch.bfloat16))


def held_by_engine(module: Policy, muon: bool, average: float | None = None) -> int:
    """Returns the bytes of fp32 weights, optimisers' state and moving average, without counts of steps."""
    engine = TorchEngine(module, AdamW((0.9, 0.95), 0.1, 1.0, average=average, muon=muon))
    tokens = torch.arange(24).view(2, 12)
    found = engine(tokens, torch.arange(12).expand(2, 12), torch.zeros_like(tokens))
    engine.backward(-found.logprobs.mean(), True)
    engine.step(1e-2)
    tensors = [*engine._optimised.values(), *(engine._average.values if engine._average else ())]
    for state in engine._states().values():
        tensors += [value for kind, value in state.items() if kind != "step"]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("average", [None, 0.99])
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", FREEZES[:3])
def test_the_state_of_a_tiny_model_has_the_bytes_of_the_forecast(
    fields: dict[str, Any], tied: bool, muon: bool, average: float | None
) -> None:
    module = policy(tied)
    size = size_of_config(module.model.config.to_dict())
    assert size.parameters == sum(weight.numel() for weight in module.model.parameters())
    freeze = Freeze.model_validate(fields) if fields else None
    if freeze is not None:
        freeze_weights(module.model, freeze)
    how = Training(1, TORCH, 1.0, 0, averages=average is not None, freeze=freeze, muon=muon)
    counted = trained_weights(size, how, head=True)
    assert counted.number == sum(w.numel() for w in module.parameters() if w.requires_grad)
    assert counted.by_muon == (sum(w.numel() for w in hidden_matrices(module)) if muon else 0)
    head = module.model.get_output_embeddings().weight
    assert counted.head == head.requires_grad
    state = trained(size, how, True, 0).still - CONTEXT - 2 * size.parameters
    assert state == held_by_engine(module, muon, average)


@pytest.mark.parametrize("fields", FREEZES)
def test_the_trained_weights_of_a_critic(fields: dict[str, Any]) -> None:
    scorer = Scorer(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)))
    freeze = Freeze.model_validate(fields) if fields else None
    if freeze is not None:
        freeze_weights(scorer.model, freeze, "critic")
    found = trained_weights(
        size_of_config(LlamaConfig(**SHAPE).to_dict()), Training(1, TORCH, 1.0, 0, freeze=freeze), False
    )
    score = SHAPE["hidden_size"]  # its one row is left out of the forecast
    assert found.number + score == sum(
        weight.numel() for weight in scorer.parameters() if weight.requires_grad
    )
    assert not found.head


def test_more_frozen_layers_than_there_are_freeze_all_of_them() -> None:
    """As in a critic that is smaller than the actor."""
    found, all_layers = (
        trained_weights(SMALL_MODEL, Training(1, TORCH, 1.0, 0, freeze=Freeze(layers=count)), False).number
        for count in (SMALL_MODEL.layers + 5, SMALL_MODEL.layers)
    )
    assert 0 < found == all_layers < SMALL_MODEL.parameters / 2


def test_experts_are_not_of_muon() -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    module = Policy(MixtralForCausalLM(config))
    size = size_of_config(config.to_dict())
    found = sum(weight.numel() for weight in hidden_matrices(module))
    assert layer_matrices(size) * size.layers == found


def test_a_stage_takes_both_from_its_recipe() -> None:
    """Of 12 bytes a weight, frozen ones lose all, Muon's four; and the file of a state likewise."""
    plain, frozen, muon = (
        SFT.model_validate({"data": {"sources": "t.jsonl"}, "ranks": {"gpus": 1}, "dtype": "bfloat16"} | more)
        for more in ({}, {"freeze": {"embeddings": True, "layers": 4}}, {"optimizer": "muon"})
    )
    count = trained_weights(LARGE_MODEL, training_of(frozen, 0, H200.memory), True).number
    before, with_frozen, with_muon = (
        training_by_phase(config, LARGE_MODEL, 0, H200) for config in (plain, frozen, muon)
    )
    assert count < LARGE_MODEL.parameters
    less = 12 * (LARGE_MODEL.parameters - count)
    assert before["save"].gpu - with_frozen["save"].gpu == pytest.approx(less)
    assert before["save"].host - with_frozen["save"].host == pytest.approx(less)
    by_muon = 4 * LARGE_MODEL.layers * layer_matrices(LARGE_MODEL)
    assert before["save"].gpu - with_muon["save"].gpu == pytest.approx(by_muon)
    assert before["save"].host - with_muon["save"].host == pytest.approx(by_muon)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_are_of_the_trained_weights(stage: int) -> None:
    fields = {
        "data": {"sources": "p.jsonl"},
        "ranks": {"gpus": 1, "num_ranks_per_node": 4},
        "dtype": "bfloat16",
    }
    plain, frozen = (DPO.model_validate(fields | more) for more in ({}, {"freeze": {"layers": 8}}))
    held = [
        trained(LARGE_MODEL, training_of(each, stage, H200.memory), True, 0).still for each in (plain, frozen)
    ]
    count = trained_weights(LARGE_MODEL, training_of(frozen, stage, H200.memory), True).number
    assert held[0] - held[1] >= 12 * (LARGE_MODEL.parameters - count) / 4 * 0.999
