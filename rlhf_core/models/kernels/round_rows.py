"""Rounds the rows of a matrix to FP8 on a GPU, and transposes the result, with one read and one write
each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 65536  # elements of a row, which one program holds as a whole
TILE = 64


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    matrix, factors, rounded, scales, stride, columns, largest, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Runs one program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(matrix + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    if WEIGHTED:
        x *= tl.load(factors + at, mask=at < columns, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-35) / largest
    # a row with a NaN gets the scale NaN, because the conversion would turn the NaN into a number
    scale = tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    x = tl.minimum(tl.maximum(x / scale, -largest), largest)
    tl.store(rounded + row * columns + at, x.to(rounded.dtype.element_ty), mask=at < columns)


@triton.jit
def _transpose(matrix, copy, rows, columns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None]
    tile = tl.load(matrix + row[:, None].to(tl.int64) * columns + column[None], mask=inside)
    tl.store(copy + column[:, None].to(tl.int64) * rows + row[None], tl.trans(tile), mask=tl.trans(inside))


def round_rows(matrix: Tensor, factors: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Multiplies each column of (T, K) by its factor (K,), and rounds the result to `dtype` (T, K) with fp32
    scales (T,). Rows that contain NaN get the scale NaN. Raises ValueError for rows longer than
    LARGEST_BLOCK."""
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    rows, columns = matrix.shape
    rounded = torch.empty(rows, columns, dtype=dtype, device=matrix.device)
    scales = torch.empty(rows, dtype=torch.float32, device=matrix.device)
    block = triton.next_power_of_2(columns)
    if block > LARGEST_BLOCK:
        raise ValueError(f"rows of {columns} numbers cannot be rounded to FP8: leave float8 out")
    given = matrix if factors is None else factors
    largest = torch.finfo(dtype).max
    warps = min(32, max(4, block // 1024))
    _round[(rows,)](
        matrix,
        given,
        rounded,
        scales,
        matrix.stride(0),
        columns,
        largest,
        factors is not None,
        block,
        num_warps=warps,
    )
    return rounded, scales


def transpose(matrix: Tensor) -> Tensor:
    """Returns a copy (K, N) of a matrix (N, K) that has one byte per element."""
    rows, columns = matrix.shape
    copy = matrix.new_empty(columns, rows, dtype=torch.uint8)
    _transpose[triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)](
        matrix.view(torch.uint8), copy, rows, columns, TILE
    )
    return copy.view(matrix.dtype)
