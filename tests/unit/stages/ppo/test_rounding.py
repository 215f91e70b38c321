"""Noise of the size of rounding errors: what it does to log-probs is what rounding does, in families with and
without named layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_core.models.weights.frozen_weights import layers_of
from rlhf_core.stages.ppo.measured.rounding import Noise, noise_of, noisy


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=500, **sizes)).eval()


def logprobs(made: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(made(input_ids=tokens).logits.float(), -1)


def test_noise_moves_log_probs_as_bf16_does() -> None:
    tokens = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    exact = model()
    whole = logprobs(exact, tokens)
    rounded = (logprobs(model().to(torch.bfloat16), tokens) - whole).abs()
    one_side = noise_of("bfloat16", {})
    with noisy(exact, Noise(one_side.branch / 2**0.5, one_side.stream / 2**0.5)):  # the trainer here is exact
        noise = (logprobs(exact, tokens) - whole).abs()
    assert 0.4 < noise.mean() / rounded.mean() < 2.5 and 0.3 < noise.max() / rounded.max() < 3
    assert torch.equal(logprobs(exact, tokens), whole), "the hooks are gone"


def test_coarser_formats_have_more_noise() -> None:
    plain = noise_of("bfloat16", {})
    cache = noise_of("bfloat16", {"kv_cache_dtype": "fp8_e4m3"})
    weights = noise_of("bfloat16", {"quantization": "fp8"})
    both = noise_of("bfloat16", {"quantization": "fp8", "kv_cache_dtype": "fp8"})
    assert (
        noise_of("float32", {}).branch
        < plain.branch / 1e4
        < plain.branch
        < cache.branch
        < weights.branch
        < both.branch
    )
    assert plain.stream == both.stream


def test_code_without_named_layers_has_noise_too() -> None:
    class Block(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states * 1.1

    made = nn.Module()
    made.blocks = nn.ModuleList([Block(), Block(), Block()])
    made.heads = nn.ModuleList([nn.Linear(1, 1)])
    assert layers_of(made) == list(made.blocks)
    with noisy(made, Noise(0.1, 0.1)):
        assert not torch.equal(made.blocks[0](hidden_states=torch.ones(1, 2, 4)), torch.full((1, 2, 4), 1.1))
    assert layers_of(nn.Linear(1, 1)) == []
    with pytest.raises(KeyError):
        noise_of("int8", {})
