"""Rounds a changed weight to its own dtype so that the change survives on average (stochastic rounding; Gupta
et al. 2015).

bf16 has 8 bits: rounding to the nearest number drops a change below half the distance to the next one, a
500th of the weight, and most adapter updates are smaller. Here the result is one of the two neighbours, the
nearer one more often, so that its mean is the exact weight. A weight's random numbers depend only on its
name: the same adapters are merged to the same weights every time.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

LOW_BITS = 16  # the bits of a float32 that bf16 does not have


def round_unbiased(exact: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Returns float32 values in `dtype`. For bf16 they are rounded at random, seeded by `name`; numbers that
    bf16 can represent stay unchanged."""
    if dtype != torch.bfloat16:
        return exact.to(dtype)
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randint(
        1 << LOW_BITS, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    bits = exact.contiguous().view(torch.int32) + noise
    rounded = (bits >> LOW_BITS << LOW_BITS).view(torch.float32)
    # NaN and inf are excluded: adding to the bits of NaN would give 0.
    return torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)


class Survival:
    """Measures which share of the weights' updates survives in the rounded weights: the projection of the
    rounded updates onto the exact ones."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # per weight: rounded update x exact update, and exact update squared

    def add(self, update: Tensor, rounded: Tensor) -> None:
        """Counts a weight, given its exact update and its rounded one, as float32 tensors."""
        exact = update.flatten()
        self._sums.append(
            torch.stack([torch.dot(rounded.flatten(), exact), torch.dot(exact, exact)]).double()
        )

    def share(self) -> float | None:
        """Returns the share, 1 if all updates are 0; None if no weight was counted."""
        if not self._sums:
            return None
        kept, whole = torch.stack(self._sums).sum(0).tolist()
        return kept / whole if whole else 1.0
