"""Judges questions in random order until the interval of each win rate is narrow enough.

A fixed-width sequential interval (Chow & Robbins 1965): the rule depends on the width only, not on which model leads, so stopping favours
neither. The width is that of the normal interval with two wins and two losses added (Agresti & Coull 1998), so that a few equal
verdicts, whose variance is zero, do not stop it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from evaluation.judges.offline import Judge, battles
from rlhf_core.data.questions import Question
from rlhf_core.records import Judgment

Z95 = 1.959964


def battles_in_turns(
    judge: Judge,
    questions: Sequence[Question],
    answers: Mapping[str, Sequence[str]],
    sides: Sequence[tuple[str, str]],
    width: float,
    step: int,
    seed: int,
) -> list[Judgment]:
    """Runs `offline.battles` on `step` questions at a time; ends a side when the interval of its win rate is at most `width` wide."""
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    judged: dict[tuple[str, str], dict[str, Judgment]] = {side: {} for side in sides}
    undecided = list(sides)
    for start in range(0, len(order), step):
        turn = order[start : start + step]
        given = {model: [texts[i] for i in turn] for model, texts in answers.items()}
        for judgment in battles(judge, [questions[i] for i in turn], given, undecided):
            judged[judgment.model, judgment.baseline][judgment.uid] = judgment
        undecided = [side for side in undecided if cautious_width([j.score for j in judged[side].values()]) > width]
        if not undecided:
            break
    return [judged[side][question.uid] for side in sides for question in questions if question.uid in judged[side]]


def cautious_width(scores: Sequence[float | None]) -> float:
    """Returns the width of the 95 % interval of the mean of the scores that are not None, with two wins and two losses added."""
    values = [*(score for score in scores if score is not None), 1.0, 1.0, 0.0, 0.0]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return 2 * Z95 * math.sqrt(variance / len(values))
