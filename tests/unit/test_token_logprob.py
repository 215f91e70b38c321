"""Log-probs of tokens with a gradient written by hand, beside autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_core.models.load import _TokenLogprob


def by_autograd(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(40, 1000, generator=generator)).to(dtype)
    targets = torch.randint(0, 1000, (40,), generator=generator)
    logits[:10].scatter_(1, targets[:10, None], 12.0)  # likely tokens, whose gradient is a small difference
    upstream = torch.randn(40, generator=generator)
    logits.requires_grad_()
    ours, entropies = _TokenLogprob.apply(logits, targets, True)
    theirs = by_autograd(logits, targets)
    assert torch.equal(ours, theirs)
    (got,), (expected,) = (torch.autograd.grad((values * upstream).sum(), logits) for values in (ours, theirs))
    assert got.dtype == dtype
    # Both are fp32 numbers rounded once to the dtype: in bf16 a unit in the last place apart at most.
    torch.testing.assert_close(got, expected, rtol=3e-6 if dtype == torch.float32 else 2**-7, atol=1e-9)
    assert (got != expected).float().mean() < (1.0 if dtype == torch.float32 else 1e-3)
    table = torch.log_softmax(logits.detach(), -1, dtype=torch.float32)
    torch.testing.assert_close(entropies, -(table.exp() * table).sum(-1))
    assert not entropies.requires_grad


def test_entropies_are_left_out_when_nobody_asks() -> None:
    _, entropies = _TokenLogprob.apply(torch.randn(3, 5), torch.tensor([0, 1, 2]), False)
    assert torch.equal(entropies, torch.zeros(3))
