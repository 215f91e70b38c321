"""Computes log-probs of single tokens from logits on a GPU, with one read in the forward pass, and one read
and one write in the backward pass.

The softmax is never stored; PyTorch stores it in each pass as an fp32 tensor, twice the size of the logits.
`token_logprobs.py` does the same with PyTorch when there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that a program processes at once


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    logits,
    targets,
    logprobs,
    sums,
    entropies,
    floors,
    columns,
    scale,
    ENTROPY: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Runs one program per row, keeping the running maximum and sum of exponentials of Milakov & Gimelshein
    2018 (arXiv:1805.02867). `CUT`: use only scaled logits at or above the row's floor."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row) if CUT else 0.0
    logits += row * columns
    maximum = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
        if CUT:
            x = tl.where(x >= floor, x, float("-inf"))
        highest = tl.maximum(maximum, tl.max(x, 0))
        shares = tl.exp(x - highest)
        earlier = tl.exp(maximum - highest)
        if CUT:  # a block may contain nothing at or above the floor
            shares = tl.where(x >= floor, shares, 0.0)
            earlier = tl.where(total > 0, earlier, 0.0)
        if ENTROPY:  # uses distances from the maximum, so that an entropy near 0 keeps its digits
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
    logits,
    targets,
    sums,
    entropies,
    grads,
    entropy_grads,
    floors,
    columns,
    scale,
    ENTROPY: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Runs one program per block of a row: overwrites the logits with `g (onehot - p) - g_H p (log p + H)`. p
    is 0 below the row's floor."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * columns + at
    inside = at < columns
    x = tl.load(logits, mask=inside, other=float("-inf")).to(tl.float32) * scale
    if CUT:
        x = tl.where(x >= tl.load(floors + row), x, float("-inf"))
    logp = x - tl.load(sums + 2 * row) - tl.load(sums + 2 * row + 1)
    p = tl.exp(logp)
    grad = tl.load(grads + row)
    result = tl.where(at == tl.load(targets + row), (1.0 - p) * grad, -p * grad)
    if ENTROPY:
        result -= tl.where(p > 0, tl.load(entropy_grads + row) * p * (logp + tl.load(entropies + row)), 0.0)
    tl.store(logits, (result * scale).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _floors(logits, targets, floors, columns, scale, top_p, top_k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Runs one program per row: bisects an interval below the maximum, first for the k-th largest logit, then
    for the mass of `top_p`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    maximum = float("-inf")
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
        maximum = tl.maximum(maximum, tl.max(x, 0))
    lowest = maximum - 64.0  # tokens below it have no probability in fp32
    if top_k > 0:
        low = lowest
        high = maximum  # at least `top_k` logits are at or above `low`, unless `low` is `lowest`
        for _ in range(28):
            middle = (low + high) / 2
            count = 0
            for start in range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
                count += tl.sum((x >= middle).to(tl.int32), 0)
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
        lowest = low
    if top_p < 1.0:
        total = 0.0
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
            total += tl.sum(tl.where(x >= lowest, tl.exp(x - maximum), 0.0), 0)
        low = lowest
        high = maximum  # at least `top_p` of the mass is at or above `low`
        for _ in range(28):
            middle = (low + high) / 2
            mass = 0.0
            for start in range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
                mass += tl.sum(tl.where(x >= middle, tl.exp(x - maximum), 0.0), 0)
            low = tl.where(mass >= top_p * total, middle, low)
            high = tl.where(mass >= top_p * total, high, middle)
        lowest = low
    wanted = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(floors + row, tl.minimum(lowest, wanted))


def floors(logits: Tensor, targets: Tensor, scale: float, top_p: float, top_k: int) -> Tensor:
    """Returns the lowest scaled logit that each row's distribution keeps, which is at most the target's
    scaled logit, (N,) fp32. logits: (N, V). targets: (N,)."""
    rows, columns = logits.shape
    found = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        _floors[(rows,)](
            logits.contiguous(), targets, found, columns, scale, float(top_p), int(top_k), BLOCK, num_warps=8
        )
    return found


def read(
    logits: Tensor, targets: Tensor, scale: float, entropy: bool, floors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads (N, V) logits in any float dtype and (N,) targets. Returns log-probs of the targets (N,), values
    for `differentiate` (N, 2), and entropies (N,), all fp32. `floors` (N,): the lowest scaled logit that each
    row's distribution keeps."""
    rows, columns = logits.shape
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    sums = logits.new_empty((rows, 2), dtype=torch.float32)
    entropies = torch.zeros_like(logprobs)
    if rows:
        cut = floors is not None
        least = logprobs if floors is None else floors.contiguous()
        _read[(rows,)](
            logits.contiguous(),
            targets,
            logprobs,
            sums,
            entropies,
            least,
            columns,
            scale,
            entropy,
            cut,
            BLOCK,
            num_warps=8,
        )
    return logprobs, sums, entropies


def differentiate(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    entropies: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    scale: float,
    floors: Tensor | None = None,
) -> Tensor:
    """Overwrites the logits (N, V) with their gradient."""
    rows, columns = logits.shape
    if rows:
        grid = (rows, triton.cdiv(columns, BLOCK))
        grads = grads.contiguous()
        other = grads if entropy_grads is None else entropy_grads.contiguous()
        least = grads if floors is None else floors.contiguous()
        which = (entropy_grads is not None, floors is not None)
        _differentiate[grid](
            logits, targets, sums, entropies, grads, other, least, columns, scale, *which, BLOCK, num_warps=8
        )
    return logits
