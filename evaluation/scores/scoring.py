"""Computes win rates, their intervals, consistency and agreement from judgments. All functions are pure.

A `Judgment` (a battle) is one question judged in two games with the answers swapped. A game gives the model
0, 0.5 or 1, or has no verdict. A question's score is the mean of its games; the win rate is the mean over
questions. Intervals are over *questions* (both games together). Treating games as independent, as
arena-hard-auto treats its rows, understates the standard deviation by about a third. Every interval of a
rate, or of a mean of scores from 0 to 1, is a `rate_interval`; `bootstrap_interval` is for means of other
values. Style control and Bradley-Terry scores are in `arena_hard`, and the Bradley-Terry fit is in
`bradley_terry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.mean_interval import mean_interval
from rlhf_core.records import Judgment, WinRate

STRONG_ROWS = 3  # Arena-Hard counts a strong win or loss as three rows
GAMES = 2  # per question
CELLS = 1 << 22  # most resampled indices in memory at once: 32 MB

Floats = NDArray[np.float64]


class QuestionSums(NamedTuple):
    """The weighted sum of scores (`total`) and the sum of weights (`weight`) per question, (Q,) each, sorted
    by question id. `heaviest`: the largest weight that a question can have."""

    total: Floats
    weight: Floats
    heaviest: float = 1.0

    @property
    def score(self) -> float:
        """Returns the weighted mean over all questions."""
        return float(self.total.sum() / self.weight.sum())


def plain_sums(judgments: Sequence[Judgment]) -> QuestionSums:
    """Returns the sums of battles with weight 1, scored by the mean of their games. Leaves out battles
    without any verdict."""
    return sums_of([(j.uid, j.score, 1.0) for j in judgments if j.score is not None])


def arena_sums(judgments: Sequence[Judgment]) -> QuestionSums:
    """Returns the sums of games with weight 1, or 3 for strong verdicts (arena-hard-auto,
    `show_result.py`)."""
    rows = [
        (judgment.uid, score, STRONG_ROWS if game.score in ("A>>B", "B>>A") else 1.0)
        for judgment in judgments
        for game, score in zip(judgment.games, judgment.scores, strict=True)
        if score is not None
    ]
    # Not the largest weight in the data, which would fall if a strong win became a weak one, so that the
    # interval might rise.
    return sums_of(rows)._replace(heaviest=float(GAMES * STRONG_ROWS))


def sums_of(rows: Sequence[tuple[str, float, float]]) -> QuestionSums:
    """Returns the sums by question of rows (question id, score, weight). Raises ValueError when there are
    none."""
    if not rows:
        raise ValueError("no game has a verdict, so there is no score: see the judgments for the reason")
    uids, question_index = np.unique([uid for uid, _, _ in rows], return_inverse=True)
    score = np.array([row[1] for row in rows])
    weight = np.array([row[2] for row in rows])
    score_sums, weight_sums = (
        np.bincount(question_index, values, len(uids)).astype(np.float64)
        for values in (score * weight, weight)
    )
    return QuestionSums(score_sums, weight_sums, float(weight_sums.max()))


def bootstrap_interval(
    sums: QuestionSums, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of `sums.score` over questions (Efron & Tibshirani 1993, ch.
    13)."""
    count = len(sums.total)
    generator = np.random.default_rng(seed)
    scores: list[Floats] = []
    step = max(1, CELLS // count)
    for start in range(0, resamples, step):
        drawn = generator.integers(count, size=(min(step, resamples - start), count))  # (resamples, Q)
        scores.append(sums.total[drawn].sum(1) / sums.weight[drawn].sum(1))
    low, high = np.quantile(np.concatenate(scores), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def rate_interval(sums: QuestionSums, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval of `sums.score`, for scores from 0 to 1 (see `rlhf_core.mean_interval`)."""
    return mean_interval(sums.total, sums.weight, sums.heaviest, level)


def difference_interval(differences: Floats, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval of the mean of score differences, (Q,) from -1 to 1."""
    low, high = mean_interval((differences + 1) / 2, np.ones(len(differences)), level=level)
    return 2 * low - 1, 2 * high - 1


def win_rate(judgments: Sequence[Judgment]) -> WinRate:
    """Returns the win rate of one model against one baseline according to one judge, with its interval and
    other statistics.

    Raises ValueError when no game has a verdict.
    """
    sides = {(judgment.model, judgment.baseline, judgment.judge) for judgment in judgments}
    assert len(sides) <= 1, (
        f"a win rate mixes judgments of several (model, baseline, judge) comparisons: {sorted(sides)}"
    )
    sums = plain_sums(judgments)
    low, high = rate_interval(sums)
    first = judgments[0]
    winners = np.sign(np.round(sums.total - sums.weight / 2, 9))
    return WinRate(
        model=first.model,
        baseline=first.baseline,
        judge=first.judge,
        win_rate=sums.score,
        ci_low=low,
        ci_high=high,
        num_questions=len(sums.total),
        num_failed=sum(game.score is None for judgment in judgments for game in judgment.games),
        swap_consistency=swap_consistency(judgments),
        by_category=by_category(judgments),
        num_won=int((winners > 0).sum()),
        num_tied=int((winners == 0).sum()),
        num_lost=int((winners < 0).sum()),
        arena_score=arena_sums(judgments).score,
    )


def swap_consistency(judgments: Sequence[Judgment]) -> float:
    """Returns the fraction of questions whose two games name the same winner, among questions with two
    verdicts (0 if there are none)."""
    same = [
        first == second
        for first, second in (j.scores for j in judgments)
        if first is not None and second is not None
    ]
    return sum(same) / len(same) if same else 0.0


def by_category(judgments: Sequence[Judgment]) -> dict[str, float]:
    """Returns the win rate per category, for categories with at least one verdict."""
    judged = [judgment for judgment in judgments if judgment.score is not None]
    names = sorted({judgment.category for judgment in judged})
    return {name: plain_sums([j for j in judged if j.category == name]).score for name in names}


def agreement(ours: Sequence[Judgment], theirs: Sequence[Judgment]) -> float | None:
    """Returns the fraction of common battles (same question and models) in which two judges name the same
    winner; None if there are none."""
    others = {(j.uid, j.model, j.baseline): j.score for j in theirs}
    pairs = [(j.score, others.get((j.uid, j.model, j.baseline))) for j in ours]
    same = [
        _winner(ours_) == _winner(theirs_)
        for ours_, theirs_ in pairs
        if ours_ is not None and theirs_ is not None
    ]
    return sum(same) / len(same) if same else None


def _winner(score: float) -> int:
    return (score > 0.5) - (score < 0.5)
