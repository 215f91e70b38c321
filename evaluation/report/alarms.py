"""Finds problems that make a run's other results worthless, such as truncated answers, and rewards or
gradients without a signal. The run's page shows these problems at the top."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from evaluation.report.summary import Curve, Evaluated, Evidence

NEARLY_ALL = 0.99
CUT = "response/truncated"
RAISE = "raise generate_max_len, or train the model to end its answers"


class Alarm(NamedTuple):
    """A warning sentence about a stage or a model."""

    about: str
    sentence: str


def alarms(stages: Sequence[Evidence], evaluated: Evaluated | None) -> list[Alarm]:
    """Returns the alarms of all stages and of the evaluation's models."""
    found = [alarm for stage in stages for alarm in _of_stage(stage)]
    cut = evaluated.report.truncated if evaluated else {}
    for model, share in cut.items():
        if share >= NEARLY_ALL:
            found.append(
                Alarm(
                    model,
                    f"{_share(share)} of its answers in the evaluation are cut at the length limit: {RAISE}.",
                )
            )
    return found


def _of_stage(stage: Evidence) -> list[Alarm]:
    name = stage.view.name
    metrics = stage.result.metrics if stage.result else {}
    found = []
    share = metrics.get(CUT, 0.0)
    if share >= NEARLY_ALL:
        found.append(
            Alarm(name, f"{_share(share)} of the sampled answers are cut at the length limit: {RAISE}.")
        )
    if _is_zero(stage.curves.get("reward/std", [])) or metrics.get("reward/std") == 0:
        found.append(
            Alarm(
                name,
                "all answers have the same reward, so there is nothing to learn: check the reward's source.",
            )
        )
    if any(_is_zero(stage.curves.get(gradient, [])) for gradient in ("grad_norm", "policy/grad_norm")):
        found.append(
            Alarm(
                name,
                "the gradient is zero in every step, so the model has not changed: check data, loss and"
                " learning rate.",
            )
        )
    return found


def _is_zero(curve: Curve) -> bool:
    values = [value for _, value in curve if math.isfinite(value)]
    return bool(values) and not any(values)


def _share(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:.1f} %"
