"""Simulated evaluations of a known win rate, and how often the interval of `mean_interval` covers it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from rlhf_core.mean_interval import Floats, mean_interval

VALUES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
Counts = tuple[int, ...]  # of VALUES


def no_ties(rate: float) -> Floats:
    return np.array([1 - rate, 0, 0, 0, rate])


def ties(rate: float) -> Floats:
    """As many ties as the baseline scores: half of the questions at a rate of 0.5, a fifth at 0.8."""
    return np.array([(1 - rate) / 2, 0, 1 - rate, 0, (3 * rate - 1) / 2])


def no_losses(rate: float) -> Floats:
    """Nothing but wins and ties."""
    return np.array([0, 0, 2 * (1 - rate), 0, 2 * rate - 1])


def two_games(rate: float) -> Floats:
    """The mean of two independent games with `ties`."""
    loss, _, tie, _, win = ties(rate)
    return np.array([loss**2, 2 * loss * tie, tie**2 + 2 * loss * win, 2 * tie * win, win**2])


KINDS: dict[str, Callable[[float], Floats]] = {
    "wins and losses": no_ties,
    "ties": ties,
    "wins and ties": no_losses,
    "two games": two_games,
}


@cache
def interval_of(counts: Counts) -> tuple[float, float]:
    """Returns the interval of questions with these scores."""
    scores = np.repeat(VALUES, counts)
    return mean_interval(scores, np.ones(len(scores)))


def coverage(chances: Floats, questions: int, evaluations: int, seed: int = 0) -> float:
    """Returns the share of simulated evaluations whose interval covers the true rate; `chances` (5,): of
    VALUES."""
    rate = float(chances @ VALUES)
    drawn = np.random.default_rng(seed).multinomial(questions, np.maximum(chances, 0), size=evaluations)
    counts, times = np.unique(drawn, axis=0, return_counts=True)
    low, high = np.array([interval_of(tuple(row)) for row in counts.tolist()]).T
    covered = (low <= rate + 1e-9) & (rate - 1e-9 <= high)
    return float(times[covered].sum() / evaluations)
