"""Chooses the best of several models on the questions of one evaluation. All functions are pure.

Two models are compared on the same questions. The interval covers the mean difference over questions, at a
level of 1 - 0.05 / (number of pairs of models) (Bonferroni). All pairs count, because the same questions also
determine which model is compared with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np

from evaluation.scores.scoring import difference_interval
from rlhf_core.records import Frozen

ERROR_RATE = 0.05  # probability that any of several equal models counts as worse


class WinRateDifference(Frozen):
    """The best model's win rate minus the win rate of `model`, with its interval."""

    model: str
    win_rate: float
    difference: float
    low: float
    high: float


class Choice(Frozen):
    """The chosen model. `clear`: whether the best model is significantly better than every other model. If
    not, the first model in `equal` is chosen; `equal` lists the best model and every model that is not
    significantly worse. `questions`: number of questions on which all models have a verdict."""

    chosen: str
    best: str
    clear: bool
    equal: tuple[str, ...]
    questions: int
    differences: tuple[WinRateDifference, ...]

    @property
    def sentence(self) -> str:
        rates = {one.model: one.win_rate for one in self.differences}
        if self.clear:
            better = f"better than each of the {len(rates) - 1} others"
            return f"{self.chosen} is chosen: its win rate is {rates[self.chosen]:.3f}, {better}"
        others = ", ".join(
            f"{one.model} {one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]" for one in self._open
        )
        return (
            f"no model is better than all others on {self.questions} questions: {self.best} has the highest"
            f" win rate, {rates[self.best]:.3f}, but its lead over {others} may be due to chance;"
            f" {self.chosen} is chosen, the simplest of these"
        )

    @property
    def _open(self) -> list[WinRateDifference]:
        return [one for one in self.differences if one.model in self.equal and one.model != self.best]


def choose(scores: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> Choice:
    """Returns the best of the models in `order`, or the first model that is not significantly worse than the
    best. `scores`: model -> question -> score from 0 to 1. Raises ValueError when no question has a verdict
    on all models."""
    common = sorted(set.intersection(*(set(scores[model]) for model in order)))
    if not common:
        raise ValueError(
            "no question has a verdict for every model, so the models cannot be compared: see the judgments"
            " for the reason"
        )
    table = np.array([[scores[model][uid] for model in order] for uid in common])  # (Q, M)
    rates = table.mean(0)
    best = int(rates.argmax())  # the first among equals
    leads = table[:, [best]] - table  # (Q, M)
    level = 1 - ERROR_RATE / max(1, comb(len(order), 2))
    ends = [(0.0, 0.0) if i == best else difference_interval(leads[:, i], level) for i in range(len(order))]
    means = leads.mean(0)
    differences = tuple(
        WinRateDifference(
            model=model, win_rate=float(rates[i]), difference=float(means[i]), low=low, high=high
        )
        for i, (model, (low, high)) in enumerate(zip(order, ends, strict=True))
    )
    equal = tuple(model for i, model in enumerate(order) if i == best or ends[i][0] <= 0)
    return Choice(
        chosen=equal[0],
        best=order[best],
        clear=len(equal) == 1,
        equal=equal,
        questions=len(common),
        differences=differences,
    )
