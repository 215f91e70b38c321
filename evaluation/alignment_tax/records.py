"""Defines the records of lm-eval's results. Torch-free; does not import lm-eval."""

from __future__ import annotations

from rlhf_core.records import Frozen


class Score(Frozen):
    """One metric of one task. `documents` maps each document to its value if `value` is their mean, else
    None."""

    value: float
    stderr: float | None
    higher_is_better: bool
    documents: dict[str, float] | None


class TaskScores(Frozen):
    """A task or group: its metrics by `metric,filter` in lm-eval's order (the first is the main one), and its
    number of documents."""

    metrics: dict[str, Score]
    documents: int


class ModelScores(Frozen):
    """All tasks of one model, by the recipe's name of the task. `identity`: digest of its files
    (`served_models.identity_of`)."""

    model: str
    identity: str
    tasks: dict[str, TaskScores]
    lm_eval: str
