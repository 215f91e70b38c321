"""PyTorch's varlen attention on a card, beside flash-attn's and a block-diagonal mask: the same numbers and gradients in bf16."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rlhf_core.data.collate import collate
from rlhf_core.models import attention
from rlhf_core.models.load import Policy
from tests.unit.test_models import SHAPE, documents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDE = SHAPE | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("window", [None, 4])
def test_all_implementations_agree(window: int | None) -> None:
    torch.manual_seed(0)
    policy = Policy(MistralForCausalLM(MistralConfig(**WIDE, sliding_window=window)).to("cuda", torch.bfloat16).eval())
    assert attention.settled(policy.model).config._attn_implementation == attention.PYTORCH
    batch = collate([documents()[:3], documents()[3:]], pad_token_id=0).to("cuda")
    found = {}
    for name in ("eager", "sdpa", attention.FLASH, attention.PYTORCH):
        if name == attention.FLASH and find_spec("flash_attn") is None:
            continue
        policy.model.set_attn_implementation(name)
        policy.zero_grad()
        logprobs = policy(batch.tokens, batch.positions, batch.documents).logprobs
        logprobs.sum().backward()
        found[name] = logprobs.detach(), torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])
    logprobs, gradient = found["eager"]
    for name, (ours, our_gradient) in found.items():
        assert (ours - logprobs).abs().max() < 0.05, name
        assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.999, name
