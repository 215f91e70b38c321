"""The moving average of trained weights (Polyak and Juditsky 1992), in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KIND = "average"  # of its tensors in a training state (`state_files`)


class MovingAverage:
    """`average = decay * average + (1 - decay) * weight` after each optimiser step, from the weights before
    the first. Holds 4 bytes per weight, beside the optimiser's fp32 weights."""

    def __init__(self, weights: Sequence[Tensor], decay: float):
        self._weights = [weight.detach() for weight in weights]
        self._decay = decay
        self.values = [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights as they are after a step."""
        torch._foreach_lerp_(self.values, self._weights, 1 - self._decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and averages, one tensor at a time."""
        for value, weight in zip(self.values, self._weights, strict=True):
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)
