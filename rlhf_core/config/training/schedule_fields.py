"""The learning rate's schedule. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.records import Config, InDigestIfSet, Share, check

WARMUP_RATIO = 0.03


class ScheduleFields(Config):
    """The course of the learning rate over a run's optimiser steps (`training/learning_rate.py`)."""

    schedule: Annotated[Literal["cosine", "linear", "constant", "wsd"], InDigestIfSet] = Field(
        "cosine",
        description=(
            "the learning rate after its warm-up. cosine, linear: it falls to min_lr_ratio of the peak;"
            " constant: it stays; wsd: it stays, then falls linearly in the last decay_ratio of the steps"
            " (MiniCPM, Hu et al. 2024)"
        ),
    )
    warmup_ratio: Share = Field(
        WARMUP_RATIO, description="share of the optimiser steps with a linear warm-up"
    )
    warmup_steps: Annotated[int | None, InDigestIfSet] = Field(
        None, ge=0, description="optimiser steps with a linear warm-up, in place of warmup_ratio"
    )
    decay_ratio: Annotated[float, InDigestIfSet] = Field(
        0.1,
        gt=0,
        le=1,
        description="schedule wsd: the last share of the optimiser steps, in which the rate falls",
    )
    min_lr_ratio: Share = Field(0.1, description="a falling schedule ends at this share of the peak")

    @check
    def _check_schedule(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio not in (0, WARMUP_RATIO):
            yield (
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} are two lengths of"
                " one warm-up: leave one of them out"
            )
        elif (
            self.schedule == "wsd" and self.warmup_steps is None and self.warmup_ratio + self.decay_ratio > 1
        ):
            yield (
                f"warmup_ratio={self.warmup_ratio} and decay_ratio={self.decay_ratio} are more than all steps"
                " together: lower one of them"
            )
