"""Computes logits in fp32 from 16-bit hidden states and head weights (MiniMax-M1, arXiv:2506.13585).

In bf16, logits around 20 are multiples of 1/8, so the log-probs of two programs that round them differ by
about as much. The product of two 16-bit numbers is exact in fp32, so here only the sums are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 8192  # rows of the head's weights that are converted to fp32 at once on a CPU


def fp32_product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns (N, V): `hidden` (N, H) times `weight` (V, H) plus `bias` (V,), in fp32 for 16-bit factors. On
    a GPU the matrix units accumulate in fp32 anyway, so no weights are copied."""
    if hidden.dtype.itemsize > 2:
        return F.linear(hidden, weight, bias)
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        wide = hidden.float()
        logits = wide.new_empty(len(hidden), len(weight))
        for start in range(0, len(weight), ROWS):
            logits[:, start : start + ROWS] = wide @ weight[start : start + ROWS].float().t()
    return logits if bias is None else logits.add_(bias)


def fp32_forward(head: nn.Module, hidden: Tensor) -> Tensor:
    """Computes a linear head's logits (..., H) -> (..., V) in fp32, replacing its forward function. The
    gradient of the logits is rounded to the dtype of `hidden` before it is multiplied."""
    logits = _Fp32Product.apply(hidden.flatten(0, -2), head.weight)
    if head.bias is not None:
        logits = logits + head.bias
    return logits.unflatten(0, hidden.shape[:-1])


class _Fp32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return fp32_product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        rounded = grad.to(hidden.dtype)
        of_hidden = rounded @ weight if ctx.needs_input_grad[0] else None
        of_weight = rounded.t() @ hidden if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight
