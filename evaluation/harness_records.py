"""What lm-eval found, as records of our own. Torch-free, and free of lm-eval."""

from __future__ import annotations

from rlhf_core.types import Frozen


class Score(Frozen):
    """One metric of one task. `documents` maps each document to its value when `value` is their mean, else it is None."""

    value: float
    stderr: float | None
    higher_is_better: bool
    documents: dict[str, float] | None


class TaskScores(Frozen):
    """A task or group: its metrics as `metric,filter` in lm-eval's order (the first is the main one), and how many documents it has."""

    metrics: dict[str, Score]
    documents: int


class ModelScores(Frozen):
    """All tasks of one model, by the recipe's name of the task. `identity` stands for its files (`local.identity_of`)."""

    model: str
    identity: str
    tasks: dict[str, TaskScores]
    lm_eval: str
