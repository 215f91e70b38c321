"""Log-probs of single tokens from logits on a GPU: one read in the forward pass, one read and one write in the backward pass.

The softmax is never stored; in PyTorch it takes an fp32 tensor, twice the size of the logits, in each pass.
`token_logprobs.py` does the same with PyTorch where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of one row that a program holds at once


@triton.jit
def _read(logits, targets, logprobs, sums, entropies, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row: the running maximum and sum of exponentials of Milakov & Gimelshein 2018 (arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    maximum, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
        highest = tl.maximum(maximum, tl.max(x, 0))
        shares, earlier = tl.exp(x - highest), tl.exp(maximum - highest)
        if ENTROPY:  # of the distances to the maximum: an entropy near 0 keeps its digits
            weighted += tl.where(total > 0, total * (maximum - highest), 0.0)
            weighted = weighted * earlier + tl.sum(tl.where(shares > 0, shares * (x - highest), 0.0), 0)
        total = total * earlier + tl.sum(shares, 0)
        maximum = highest
    wanted = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, wanted - maximum - tl.log(total))
    tl.store(sums + 2 * row, maximum)
    tl.store(sums + 2 * row + 1, tl.log(total))
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits, targets, sums, entropies, grads, entropy_grads, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per block of a row: `g (onehot - p) - g_H p (log p + H)`, in place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * columns + at
    inside = at < columns
    x = tl.load(logits, mask=inside, other=float("-inf")).to(tl.float32) * scale
    logp = x - tl.load(sums + 2 * row) - tl.load(sums + 2 * row + 1)
    p, grad = tl.exp(logp), tl.load(grads + row)
    result = tl.where(at == tl.load(targets + row), (1.0 - p) * grad, -p * grad)
    if ENTROPY:
        result -= tl.where(p > 0, tl.load(entropy_grads + row) * p * (logp + tl.load(entropies + row)), 0.0)
    tl.store(logits, (result * scale).to(logits.dtype.element_ty), mask=inside)


def read(logits: Tensor, targets: Tensor, scale: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(N, V) logits in any float dtype, (N,) -> log-probs of the targets (N,), what `differentiate` needs (N, 2), entropies (N,); fp32."""
    rows, columns = logits.shape
    logprobs, sums = logits.new_empty(rows, dtype=torch.float32), logits.new_empty((rows, 2), dtype=torch.float32)
    entropies = torch.zeros_like(logprobs)
    if rows:
        _read[(rows,)](logits.contiguous(), targets, logprobs, sums, entropies, columns, scale, entropy, BLOCK, num_warps=8)
    return logprobs, sums, entropies


def differentiate(
    logits: Tensor, targets: Tensor, sums: Tensor, entropies: Tensor, grads: Tensor, entropy_grads: Tensor | None, scale: float
) -> Tensor:
    """Overwrites the logits (N, V) with their gradient."""
    rows, columns = logits.shape
    if rows:
        grid = (rows, triton.cdiv(columns, BLOCK))
        other = grads if entropy_grads is None else entropy_grads.contiguous()
        _differentiate[grid](
            logits, targets, sums, entropies, grads.contiguous(), other, columns, scale, entropy_grads is not None, BLOCK, num_warps=8
        )
    return logits
