"""Rounds a changed weight to its own dtype so that the change survives on average (stochastic rounding; Gupta
et al. 2015).

bf16 has 8 significant bits and fp16 has 11. Rounding to the nearest number drops any change below half the
distance to the next number (in bf16, a 500th of the weight), and most adapter updates are smaller. Here the
result is one of the two neighbours, more often the nearer neighbour, so that the mean of the result is the
exact weight. A weight's random numbers depend only on its name, so the same adapters always merge to the same
weights.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

LOW_BITS = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32's mantissa that a dtype lacks
LEAST_EXPONENT = -14  # of float16: smaller numbers are multiples of 2 ** (LEAST_EXPONENT - MANTISSA)
MANTISSA = 10  # bits
LARGEST = 65504.0  # of float16


def round_unbiased(exact: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Returns float32 values in `dtype`. For bf16 and fp16 they are rounded at random, seeded by `name`;
    values that the dtype can represent stay unchanged."""
    if dtype not in LOW_BITS:
        return exact.to(dtype)
    low_bits = LOW_BITS[dtype]
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randint(
        1 << low_bits, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    if dtype == torch.float16:
        return _to_float16(exact, noise / (1 << low_bits))
    bits = exact.contiguous().view(torch.int32) + noise
    rounded = (bits >> low_bits << low_bits).view(torch.float32)
    # NaN and inf are excluded: adding to the bits of NaN would give 0.
    return torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)


def _to_float16(exact: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 values to one of their two neighbours in fp16, whose distance is constant below 2 **
    LEAST_EXPONENT. `noise`: at least 0 and below 1, for each value. Values beyond LARGEST are rounded as in
    PyTorch."""
    _, exponent = torch.frexp(exact)  # for a mantissa between 1/2 and 1
    distance = torch.ldexp(torch.ones_like(exact), (exponent - 1).clamp(min=LEAST_EXPONENT) - MANTISSA)
    size = (torch.floor(exact.abs() / distance + noise) * distance).clamp(max=LARGEST)
    return torch.where(exact.abs() <= LARGEST, size.copysign(exact), exact).to(torch.float16)


class Survival:
    """Measures the fraction of the weights' updates that survives rounding, as the projection of the rounded
    updates onto the exact updates."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # per weight: rounded update x exact update, and exact update squared

    def add(self, update: Tensor, rounded: Tensor) -> None:
        """Counts a weight, given its exact and its rounded update as float32 tensors."""
        exact = update.flatten()
        self._sums.append(
            torch.stack([torch.dot(rounded.flatten(), exact), torch.dot(exact, exact)]).double()
        )

    def share(self) -> float | None:
        """Returns the fraction; 1 if all updates are 0, None if no weight was counted."""
        if not self._sums:
            return None
        kept, whole = torch.stack(self._sums).sum(0).tolist()
        return kept / whole if whole else 1.0
