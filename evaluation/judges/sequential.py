"""Judges questions in random order until the confidence interval of each win rate is narrow enough.

Uses a fixed-width sequential interval (Chow & Robbins 1965). The rule depends only on the width, not on which
model leads, so stopping favours neither. The report shows the same interval, which stays wide after a few
equal verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from evaluation.judges.offline import Judge, battles
from evaluation.scores.scoring import QuestionSums, rate_interval
from rlhf_core.data.questions import Question
from rlhf_core.records import Judgment


def battles_in_turns(
    judge: Judge,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[str]],
    sides: Sequence[tuple[str, str]],
    width: float,
    step: int,
    seed: int,
) -> list[Judgment]:
    """Runs `offline.battles` on `step` questions at a time. Stops judging a (model, baseline) pair once the
    confidence interval of its win rate is at most `width` wide. Returns the judgments made."""
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    judged: dict[tuple[str, str], dict[str, Judgment]] = {side: {} for side in sides}
    undecided = list(sides)
    for start in range(0, len(order), step):
        turn = order[start : start + step]
        given = {model: [texts[i] for i in turn] for model, texts in answers.items()}
        for judgment in battles(judge, [questions[i] for i in turn], given, undecided):
            judged[judgment.model, judgment.baseline][judgment.uid] = judgment
        scores = {side: [judgment.score for judgment in judged[side].values()] for side in undecided}
        undecided = [side for side in undecided if interval_width(scores[side]) > width]
        if not undecided:
            break
    return [
        judged[side][question.uid] for side in sides for question in questions if question.uid in judged[side]
    ]


def interval_width(scores: Sequence[float | None]) -> float:
    """Returns the width of the 95 % confidence interval of the mean of the scores that are not None; 1 if all
    are None."""
    given = np.array([score for score in scores if score is not None], dtype=np.float64)
    low, high = rate_interval(QuestionSums(given, np.ones(len(given))))
    return high - low
