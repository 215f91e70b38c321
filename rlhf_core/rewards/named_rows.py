"""Metrics of answers by what their rows name, such as the task of a generated question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.config.generated_data import GENERATED
from rlhf_core.config.rewarding.verifiers import ReasoningGymReward
from rlhf_core.config.rewards import RewardSource

RIGHT = 1 - 1e-6  # the score of a right answer is 1


def task_metrics(
    sources: Sequence[RewardSource],
    by_source: Mapping[str, np.ndarray],
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
) -> dict[str, float]:
    """Returns the mean score, the share of right answers and the mean length (tokens) for each task of
    generated questions; empty unless `reward: reasoning_gym` scores them. All by answer: `by_source` (N,)
    each, nan for a failed reward, which does not count; `rows` and `lengths` (N,)."""
    title = next((source.title for source in sources if isinstance(source, ReasoningGymReward)), None)
    if title is None:
        return {}
    scores = np.asarray(by_source[title], dtype=np.float64)
    tasks = np.array([row["task"] if GENERATED in row else "" for row in rows], dtype=object)
    metrics = {}
    for task in sorted(set(tasks) - {""}):
        of_task = tasks == task
        given = scores[of_task & ~np.isnan(scores)]
        metrics[f"task/{task}/length"] = float(np.asarray(lengths)[of_task].mean())
        if len(given):
            metrics[f"task/{task}/reward"] = float(given.mean())
            metrics[f"task/{task}/right"] = float((given >= RIGHT).mean())
    return metrics
