"""Rounds a changed weight to the weight's own dtype so that the change survives on average (stochastic
rounding; Gupta et al. 2015).

bf16 has 8 bits: rounding to the nearest number drops a change that is below half the distance to the next
one, a 500th of the weight, and most updates of adapters are smaller. Here the result is one of the two
neighbours, the nearer one more often, so that its mean is the exact weight. The random numbers of a weight
depend on its name alone: the same adapters are merged to the same weights every time.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

LOW_BITS = 16  # of a float32 that bf16 does not have


def round_unbiased(exact: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Returns float32 values in `dtype`, for bf16 rounded at random by `name`; numbers that bf16 has stay as
    they are."""
    if dtype != torch.bfloat16:
        return exact.to(dtype)
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randint(
        1 << LOW_BITS, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    bits = exact.contiguous().view(torch.int32) + noise
    rounded = (bits >> LOW_BITS << LOW_BITS).view(torch.float32)
    # The bits of NaN and inf are no number to add to: NaN would become 0.
    return torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)


class Survival:
    """Sums up which share of the updates of weights is in the rounded weights: the rounded updates' part
    along the exact ones."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # of each weight: rounded update x exact update, and its square

    def add(self, update: Tensor, rounded: Tensor) -> None:
        """Counts a weight, of float32 tensors: the exact update and what became of it."""
        exact = update.flatten()
        self._sums.append(
            torch.stack([torch.dot(rounded.flatten(), exact), torch.dot(exact, exact)]).double()
        )

    def share(self) -> float | None:
        """Returns the share, 1 where nothing was to survive; None where no weight was counted."""
        if not self._sums:
            return None
        kept, whole = torch.stack(self._sums).sum(0).tolist()
        return kept / whole if whole else 1.0
