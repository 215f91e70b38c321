"""Configures the learning rate's schedule. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.records import Config, InDigestIfSet, Share, check

WARMUP_RATIO = 0.03


class ScheduleFields(Config):
    """Fields for the learning rate over a run's optimiser steps (`training/learning_rate.py`)."""

    schedule: Annotated[Literal["cosine", "linear", "constant", "wsd"], InDigestIfSet] = Field(
        "cosine",
        description=(
            "learning rate after the warm-up. cosine, linear: falls to min_lr_ratio of the peak; constant:"
            " stays at the peak; wsd: stays at the peak, then falls linearly over the last decay_ratio of the"
            " steps (MiniCPM, Hu et al. 2024)"
        ),
    )
    warmup_ratio: Share = Field(
        WARMUP_RATIO, description="share of the optimiser steps used for a linear warm-up"
    )
    warmup_steps: Annotated[int | None, InDigestIfSet] = Field(
        None, ge=0, description="number of optimiser steps used for a linear warm-up, instead of warmup_ratio"
    )
    decay_ratio: Annotated[float, InDigestIfSet] = Field(
        0.1,
        gt=0,
        le=1,
        description="schedule wsd: share of the optimiser steps, at the end, in which the rate falls",
    )
    min_lr_ratio: Share = Field(0.1, description="share of the peak at which a falling schedule ends")

    @check
    def _check_schedule(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio not in (0, WARMUP_RATIO):
            yield (
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} both set the length"
                " of the warm-up: leave one of them out"
            )
        elif (
            self.schedule == "wsd" and self.warmup_steps is None and self.warmup_ratio + self.decay_ratio > 1
        ):
            yield (
                f"warmup_ratio={self.warmup_ratio} and decay_ratio={self.decay_ratio} add up to more than all"
                " steps: lower one of them"
            )
