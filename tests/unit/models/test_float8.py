"""Float8 products of large linear layers: rounded, trained, and exported as they were."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from rlhf_core.config.training import SFT
from rlhf_core.models import float8
from rlhf_core.models.float8 import multiply_in_float8

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def model(kind: type = Qwen2ForCausalLM) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind(Qwen2Config(vocab_size=96, pad_token_id=0, num_labels=1, **SIZES)).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, Qwen2ForSequenceClassification])
def test_large_layers_alone_round_their_products_and_keep_their_names(kind: type) -> None:
    plain, rounded = model(kind), model(kind)
    assert multiply_in_float8(rounded, large=64 * 160) == 6, "gate, up and down of two layers; not attention, nor the head"
    assert {name: tuple(w.shape) for name, w in plain.state_dict().items()} == {n: tuple(w.shape) for n, w in rounded.state_dict().items()}
    assert multiply_in_float8(model(kind)) == 0, "a small model has none"


def test_gradients_are_those_of_the_model_but_for_the_rounding() -> None:
    """E4M3 keeps 4 bits of a number, E5M2 3; 23 tokens are no multiple of 16."""
    tokens = torch.randint(3, 96, (1, 23), generator=torch.Generator().manual_seed(1))
    found = []
    for large in (10**9, 64 * 160):
        trained = model()
        multiply_in_float8(trained, large=large)
        trained(input_ids=tokens, labels=tokens).loss.backward()
        found.append({name: weight.grad.float() for name, weight in trained.named_parameters()})
    gaps = {name: float((found[0][name] - grad).norm() / found[0][name].norm()) for name, grad in found[1].items()}
    assert 0.005 < gaps["model.layers.0.mlp.down_proj.weight"] < 0.2 and max(gaps.values()) < 0.3


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the package torchao"):
        multiply_in_float8(model())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dtype": "float32"}, "set dtype to bfloat16"),
        ({"lora": {}}, "does not go with lora"),
        ({"zero_stage": 3, "ranks": {"num_ranks_per_node": 2}}, "needs whole weights"),
        ({"ranks": {"num_ranks_per_node": 2}}, "set zero_stage to 2 or less"),
    ],
)
def test_what_float8_needs_is_said_before_anything_runs(changed: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SFT.model_validate({"data": {"sources": "x.jsonl"}, "float8": True, "dtype": "bfloat16"} | changed)
