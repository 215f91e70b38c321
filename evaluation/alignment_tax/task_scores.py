"""Defines the records of lm-eval's results. Needs neither torch nor lm-eval."""

from __future__ import annotations

from rlhf_core.records import Frozen


class Score(Frozen):
    """One metric of one task. `documents` maps each document to its value if `value` is their mean;
    otherwise it is None."""

    value: float
    stderr: float | None
    higher_is_better: bool
    documents: dict[str, float] | None


class TaskScores(Frozen):
    """A task or group. `metrics` are keyed by `metric,filter` in lm-eval's order (the first is the main
    one); `documents` is their number."""

    metrics: dict[str, Score]
    documents: int


class ModelScores(Frozen):
    """All tasks of one model, keyed by the recipe's name for the task. `identity` is a digest of the
    model's files (`served_models.identity_of`)."""

    model: str
    identity: str
    tasks: dict[str, TaskScores]
    lm_eval: str
