"""Scores battles: win rates, bootstrap intervals, consistency, agreement. Pure functions of judgments and seeds.

Per game a model scores 0, 0.5 or 1; a question's score is the mean of its games, the win rate the mean over questions.
Intervals resample *questions* (both games together): resampling games as if they were independent, as arena-hard-auto does
with its rows, understates the standard deviation by about a third. When all questions have the same score, Wilson's interval replaces
the bootstrap's, which would have no width. Style control and Bradley-Terry scores are in `arena_hard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.records import Judgment, WinRate

STRONG_ROWS = 3  # Arena-Hard counts a strong win or loss as three rows
CELLS = 1 << 22  # most resampled indices in memory at once: 32 MB

Floats = NDArray[np.float64]


class Clusters(NamedTuple):
    """Sums of weighted scores and of weights per question, each (Q,), sorted by uid. Score = total / weight."""

    total: Floats
    weight: Floats

    @property
    def score(self) -> float:
        """The weighted mean over all questions."""
        return float(self.total.sum() / self.weight.sum())


def plain_clusters(judgments: Sequence[Judgment]) -> Clusters:
    """Clusters battles of weight 1, scored by the mean of their games; battles without any verdict are left out."""
    return clusters_of([(j.uid, j.score, 1.0) for j in judgments if j.score is not None])


def arena_clusters(judgments: Sequence[Judgment]) -> Clusters:
    """Clusters games of weight 1, strong verdicts of weight 3 (arena-hard-auto, `show_result.py`)."""
    return clusters_of(
        [
            (judgment.uid, score, STRONG_ROWS if game.score in ("A>>B", "B>>A") else 1.0)
            for judgment in judgments
            for game, score in zip(judgment.games, judgment.scores, strict=True)
            if score is not None
        ]
    )


def clusters_of(rows: Sequence[tuple[str, float, float]]) -> Clusters:
    """Sums rows of (name of the cluster, score, weight) by cluster. Raises ValueError when there is none."""
    if not rows:
        raise ValueError("no game has a verdict, so there is no score: look at the judgments for the reason")
    uids, index = np.unique([uid for uid, _, _ in rows], return_inverse=True)
    score = np.array([row[1] for row in rows])
    weight = np.array([row[2] for row in rows])
    total, count = (np.bincount(index, values, len(uids)).astype(np.float64) for values in (score * weight, weight))
    return Clusters(total, count)


def interval(clusters: Clusters, rounds: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of `clusters.score` (Efron & Tibshirani 1993, ch. 13); resamples questions."""
    count = len(clusters.total)
    generator = np.random.default_rng(seed)
    scores: list[Floats] = []
    step = max(1, CELLS // count)
    for start in range(0, rounds, step):
        drawn = generator.integers(count, size=(min(step, rounds - start), count))  # (rounds, Q)
        scores.append(clusters.total[drawn].sum(1) / clusters.weight[drawn].sum(1))
    low, high = np.quantile(np.concatenate(scores), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def share_interval(clusters: Clusters, rounds: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Returns `interval` of a share from 0 to 1. When all questions have the same score, resamples do not vary and the interval would have
    no width for any number of questions: then Wilson's interval (1927)."""
    scores = clusters.total / clusters.weight
    if np.ptp(scores) > 1e-12:
        return interval(clusters, rounds, seed, level)
    share, count = clusters.score, len(scores)
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def win_rate(judgments: Sequence[Judgment], rounds: int, seed: int) -> WinRate:
    """Returns the win rate, interval and other statistics of one model's battles against one baseline by one judge.

    Raises ValueError when no game has a verdict.
    """
    sides = {(judgment.model, judgment.baseline, judgment.judge) for judgment in judgments}
    assert len(sides) <= 1, f"judgments of several battles in one score: {sorted(sides)}"
    clusters = plain_clusters(judgments)
    low, high = share_interval(clusters, rounds, seed)
    first = judgments[0]
    return WinRate(
        model=first.model,
        baseline=first.baseline,
        judge=first.judge,
        win_rate=clusters.score,
        ci_low=low,
        ci_high=high,
        num_questions=len(clusters.total),
        num_failed=sum(game.score is None for judgment in judgments for game in judgment.games),
        swap_consistency=swap_consistency(judgments),
        by_category=by_category(judgments),
        arena_score=arena_clusters(judgments).score,
    )


def swap_consistency(judgments: Sequence[Judgment]) -> float:
    """Returns the share of questions whose two games name the same winner, among those with two verdicts (0 when there is none)."""
    same = [first == second for first, second in (j.scores for j in judgments) if first is not None and second is not None]
    return sum(same) / len(same) if same else 0.0


def by_category(judgments: Sequence[Judgment]) -> dict[str, float]:
    """Returns the win rate per category, for categories with at least one verdict."""
    judged = [judgment for judgment in judgments if judgment.score is not None]
    names = sorted({judgment.category for judgment in judged})
    return {name: plain_clusters([j for j in judged if j.category == name]).score for name in names}


def agreement(ours: Sequence[Judgment], theirs: Sequence[Judgment]) -> float | None:
    """Returns the share of battles (same question and models) in which two judges name the same winner; None without a common battle."""
    others = {(j.uid, j.model, j.baseline): j.score for j in theirs}
    pairs = [(j.score, others.get((j.uid, j.model, j.baseline))) for j in ours]
    same = [_winner(ours_) == _winner(theirs_) for ours_, theirs_ in pairs if ours_ is not None and theirs_ is not None]
    return sum(same) / len(same) if same else None


def _winner(score: float) -> int:
    return (score > 0.5) - (score < 0.5)
