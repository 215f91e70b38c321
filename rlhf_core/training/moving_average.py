"""Keeps a moving average of trained weights (Polyak and Juditsky 1992), in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KIND = "average"  # the kind of these tensors in a training state (`state_files`)
LEAST_SHARE = 0.01  # the weights' share in an update; smaller contributions are lost in fp32 rounding
SLICE = 2**24  # elements that `swap` copies at a time


class MovingAverage:
    """Updates `average = decay * average + (1 - decay) * weight` after each optimiser step, starting from the
    weights before the first step.

    Above a decay of 0.995 it instead updates `average = decay**k * average + (1 - decay**k) * weight` after
    every k-th step, where k makes (1 - decay**k) about LEAST_SHARE. Takes 4 bytes per weight on top of the
    optimiser's fp32 weights. `steps`: the number of optimiser steps so far; set it when resuming.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float):
        self._weights = [weight.detach() for weight in weights]
        self._every = max(1, round(LEAST_SHARE / (1 - decay)))
        self._share = 1 - decay**self._every
        self.steps = 0
        self.values = [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Counts a step and, if an update is due, adds the current weights."""
        self.steps += 1
        if self.steps % self._every == 0:
            torch._foreach_lerp_(self.values, self._weights, self._share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and averages, SLICE elements at a time."""
        for value, weight in zip(self.values, self._weights, strict=True):
            for ours, theirs in zip(_slices(value), _slices(weight), strict=True):
                kept = theirs.clone()
                theirs.copy_(ours)
                ours.copy_(kept)


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor
    return flat.split(SLICE)
