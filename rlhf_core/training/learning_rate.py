"""Computes the learning rate of each optimiser step, for the training stages and PPO."""

from __future__ import annotations

import math

from rlhf_core.config.training.schedule_fields import ScheduleFields


def learning_rate(step: int, total: int, peak: float, schedule: ScheduleFields) -> float:
    """Returns the learning rate of a step: a linear warm-up to `peak`, then the decay of `schedule` to
    `min_lr_ratio * peak`.

    `step` counts from 0 to `total - 1`. The first step's rate is not 0. With wsd, the last step reaches the
    final rate; with cosine and linear, only a hypothetical step after it would. A warm-up longer than the run
    never reaches the peak.
    """
    warmup = warmup_steps(total, schedule)
    if step < warmup:
        return peak * (step + 1) / warmup
    first = warmup  # step at which the decay begins
    fallen = step - first
    if schedule.schedule == "wsd":
        falling = math.ceil(total * schedule.decay_ratio - 1e-9)  # 70 * 0.1 exceeds 7 in floating point
        first = max(warmup, total - falling)
        fallen = step - first + 1
    if schedule.schedule == "constant" or step < first:
        return peak
    progress = min(1.0, fallen / max(1, total - first))
    end = schedule.min_lr_ratio
    if schedule.schedule == "cosine":
        return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress)))
    return peak * (end + (1 - end) * (1 - progress))


def warmup_steps(total: int, schedule: ScheduleFields) -> int:
    """Returns the number of warm-up steps."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return math.ceil(total * schedule.warmup_ratio)


def tell_long_warmup(total: int, schedule: ScheduleFields) -> None:
    """Prints a warning if a run of `total` steps ends before reaching the peak."""
    if total < warmup_steps(total, schedule):
        print(
            f"warmup_steps={schedule.warmup_steps}, and this run has {total} optimiser steps: the learning"
            " rate does not reach its peak",
            flush=True,
        )
