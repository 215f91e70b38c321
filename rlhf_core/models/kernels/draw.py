"""Draws a token from each row of logits on a GPU, and returns its log-prob: one read of the logits, and one more of a block of each row.

Inversion of the distribution function in two levels (Devroye 1986, "Non-Uniform Random Variate Generation", ch. III.2): a uniform number
chooses a block by the blocks' sums of exponentials, what is left of it a token of the block. Sums over blocks and the uniform number are in
fp64, sums within a block in fp32: probabilities are right to about 1e-6 of themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of one row that a program holds at once


@triton.jit
def _sum(logits, temperatures, maxima, totals, stride, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per block of a row: its maximum, and the sum of exponentials of the distances to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32) / tl.load(temperatures + row)
    maximum = tl.max(x, 0)
    to = row * tl.num_programs(1) + block
    tl.store(maxima + to, maximum)
    tl.store(totals + to, tl.sum(tl.where(x > float("-inf"), tl.exp(x - maximum), 0.0), 0))


@triton.jit
def _first_above(shares, at, target):  # type: ignore[no-untyped-def]
    """The first place whose running sum is above `target`, so that its share is not 0; the last such place where rounding leaves none."""
    found = tl.sum((tl.cumsum(shares, 0) <= target).to(tl.int32), 0)
    return tl.maximum(tl.minimum(found, tl.max(tl.where(shares > 0, at, 0), 0)), 0)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, temperatures, uniforms, maxima, totals, tokens, logprobs, stride, columns, blocks, MANY: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    number, temperature = tl.arange(0, MANY), tl.load(temperatures + row)
    highest = tl.load(maxima + row * blocks + number, mask=number < blocks, other=float("-inf"))
    maximum = tl.max(highest, 0)
    of_blocks = tl.load(totals + row * blocks + number, mask=number < blocks, other=0.0)
    of_blocks = tl.where(highest > float("-inf"), of_blocks * tl.exp(highest - maximum), 0.0).to(tl.float64)
    total = tl.sum(of_blocks, 0)
    target = tl.load(uniforms + row) * total
    block = _first_above(of_blocks, number, target)
    target -= tl.sum(tl.where(number < block, of_blocks, 0.0), 0)
    inner = tl.arange(0, BLOCK)
    at = block * BLOCK + inner
    x = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf")).to(tl.float32) / temperature
    token = block * BLOCK + _first_above(tl.where(x > float("-inf"), tl.exp(x - maximum), 0.0), inner, target.to(tl.float32))
    chosen = tl.load(logits + row * stride + token).to(tl.float32) / temperature
    tl.store(tokens + row, token)
    tl.store(logprobs + row, chosen - maximum - tl.log(total.to(tl.float32)))


def draw(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Draws from softmax(logits / temperature) with PyTorch's generator of the device. logits: (N, V), of any floating type, left
    unchanged; temperatures: (N,), fp32, positive. Returns int32 tokens (N,) and their fp32 log-probs (N,)."""
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = triton.cdiv(columns, BLOCK)
    maxima, totals = logits.new_empty((2, rows, blocks), dtype=torch.float32)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=logits.device)
    if not rows:
        return tokens, logprobs
    _sum[(rows, blocks)](logits, temperatures, maxima, totals, logits.stride(0), columns, BLOCK)
    sizes = logits.stride(0), columns, blocks, triton.next_power_of_2(blocks)
    _choose[(rows,)](logits, temperatures, uniforms, maxima, totals, tokens, logprobs, *sizes, BLOCK)
    return tokens, logprobs
