"""Measures judge drift: the judge's agreement with the reward model, and changes from its past verdicts.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evaluation.drift.answer_drift import share_interval, sign_test
from evaluation.drift.drift_report import Signal
from evaluation.drift.resampling import spearman, spearman_interval
from evaluation.judges.offline import Judge, battles, score_gap
from evaluation.scores.scoring import difference_interval
from rlhf_core.data.anchors import AnchorPairs
from rlhf_core.records import Judgment

FEWEST = 8  # fewest questions for a rank correlation


def agreement(
    judged: Sequence[Judgment], rewarded: Sequence[Judgment], rounds: int, seed: int
) -> Signal | None:
    """Returns `judge/reward_correlation`: Spearman's correlation, over questions, between the judge's score
    of the model (0 to 1) and the difference between the reward model's scores of model and baseline.

    Returns None when fewer than FEWEST questions were judged by both, or when one of the two gives the same
    score to all of these questions.
    """
    wins = {judgment.uid: judgment.score for judgment in judged if judgment.score is not None}
    gaps = {judgment.uid: gap for judgment in rewarded if (gap := score_gap(judgment.games[1])) is not None}
    common = [uid for uid in wins if uid in gaps]
    if len(common) < FEWEST:
        return None
    one, other = (np.array([values[uid] for uid in common], dtype=np.float64) for values in (wins, gaps))
    value = float(spearman(one[None], other[None])[0])
    if not np.isfinite(value):
        return None
    low, high = spearman_interval(one, other, rounds, seed)
    return Signal(name="judge/reward_correlation", value=value, low=low, high=high, count=len(common))


def judge_anchors(judge: Judge, anchors: AnchorPairs) -> list[Signal]:
    """Returns `anchors/changed`, the fraction of anchors whose winner differs from the past winner, and
    `anchors/shift`, the change in answer B's win rate. The shift is tested with an exact sign test on the
    anchors whose score rose or fell. Raises ValueError when no game has a verdict."""
    judged = battles(judge, anchors.questions, anchors.answers, [("b", "a")])
    scores = np.array(
        [np.nan if judgment.score is None else judgment.score for judgment in judged], dtype=np.float64
    )
    held = np.isfinite(scores)
    if not held.any():
        raise ValueError(
            f"anchors: {judge.name} gave no verdict on any of {len(scores)} anchors: check the judge's log"
        )
    points = anchors.points[held]
    scores = scores[held]
    changed = (np.sign(scores - 0.5) != np.sign(points - 0.5)).astype(np.float64)
    low, high = share_interval(changed)
    share = Signal(name="anchors/changed", value=float(changed.mean()), low=low, high=high, count=len(points))
    difference = scores - points
    low, high = difference_interval(difference)
    shift = Signal(
        name="anchors/shift",
        value=float(difference.mean()),
        low=low,
        high=high,
        count=len(points),
        p=sign_test(difference),
    )
    return [share, shift]
