"""`decay` says which weights `weight_decay` acts on."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config.training.optimiser_fields import Decayed
from rlhf_core.models.policy import Policy, Scorer
from rlhf_core.training.engine import AdamW, TorchEngine
from tests.unit.training.test_frozen_weights import SHAPE

VECTORS = {
    "q_proj.bias",
    "k_proj.bias",
    "v_proj.bias",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def decayed(module: Policy | Scorer, decay: Decayed) -> set[str]:
    """Returns the weights that one step without any gradient has changed. A decayed weight is multiplied by
    1 - rate * weight_decay (Loshchilov and Hutter 2019)."""
    engine = TorchEngine(module, AdamW((0.9, 0.95), 0.5, 1.0, decay))
    before = {}
    for name, weight in module.model.named_parameters():
        with torch.no_grad():
            weight.add_(1.0)
        weight.grad = torch.zeros_like(weight)
        before[name] = weight.detach().clone()
    engine.step(0.1)
    changed = set()
    for name, weight in module.model.named_parameters():
        if not torch.equal(weight, before[name]):
            torch.testing.assert_close(weight.detach(), before[name] * 0.95)
            changed.add(name)
    return changed


@pytest.mark.parametrize("tied", [False, True])
def test_each_choice_decays_its_weights_of_a_policy(tied: bool) -> None:
    def module() -> Policy:
        return Policy(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)))

    every = {name for name, _ in module().model.named_parameters()}
    vectors = {
        name for name in every if name == "model.norm.weight" or any(name.endswith(end) for end in VECTORS)
    }
    outer = {name for name in every if "embed_tokens" in name or "lm_head" in name}
    assert len(outer) == 2 - tied
    assert decayed(module(), "all") == every
    assert decayed(module(), "matrices") == every - vectors
    assert decayed(module(), "hidden") == every - vectors - outer


def test_the_head_of_a_scorer_is_no_hidden_matrix() -> None:
    def module() -> Scorer:
        return Scorer(Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)))

    outer = decayed(module(), "matrices") - decayed(module(), "hidden")
    assert outer == {"model.embed_tokens.weight", "score.weight"}
