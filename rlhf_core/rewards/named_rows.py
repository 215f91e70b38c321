"""Computes metrics of answers grouped by a name in their rows: the task of a generated question, or an
environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.config.generated_data import GENERATED
from rlhf_core.config.rewarding.verifiers import ReasoningGymReward
from rlhf_core.config.rewards import EnvironmentReward, RewardSource

RIGHT = 1 - 1e-6  # the score of a right answer is 1


def task_metrics(
    sources: Sequence[RewardSource],
    by_source: Mapping[str, np.ndarray],
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
) -> dict[str, float]:
    """Returns the mean score, the fraction of right answers and the mean length (tokens) for each task of
    generated questions; empty unless `reward: reasoning_gym` scores them.

    All arguments are per answer: `by_source` (N,) each, with nan for failed rewards, which do not count;
    `rows` and `lengths` (N,).
    """
    title = next((source.title for source in sources if isinstance(source, ReasoningGymReward)), None)
    if title is None:
        return {}
    tasks = [row["task"] if GENERATED in row else "" for row in rows]
    return _by_name("task", tasks, by_source[title], lengths)


def environment_metrics(
    sources: Sequence[RewardSource],
    by_source: Mapping[str, np.ndarray],
    environments: Sequence[str],
    lengths: Sequence[int],
) -> dict[str, float]:
    """Returns the mean reward, the fraction of rewards of at least 1 and the mean length (tokens) of each
    environment's episodes; only the length if the environments give no reward. Arguments are as in
    `task_metrics`; `environments` (N,): names."""
    title = next((source.title for source in sources if isinstance(source, EnvironmentReward)), None)
    rewards = np.full(len(environments), np.nan) if title is None else by_source[title]
    return _by_name("environment", environments, rewards, lengths)


def _by_name(
    prefix: str, names: Sequence[str], rewards: np.ndarray, lengths: Sequence[int]
) -> dict[str, float]:
    """Returns the metrics for each name except ""."""
    values = np.asarray(rewards, dtype=np.float64)
    own_name = np.array(names, dtype=object)
    metrics = {}
    for name in sorted(set(names) - {""}):
        of_name = own_name == name
        given = values[of_name & ~np.isnan(values)]
        metrics[f"{prefix}/{name}/length"] = float(np.asarray(lengths)[of_name].mean())
        if len(given):
            metrics[f"{prefix}/{name}/reward"] = float(given.mean())
            metrics[f"{prefix}/{name}/right"] = float((given >= RIGHT).mean())
    return metrics
