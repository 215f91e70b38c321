"""Computes style-controlled scores of Arena-Hard's battles. All functions are pure.

Fits Bradley-Terry with style features as arena-hard-auto does (`show_result.py`, 2025-06), with two
differences. Intervals come from random weights of questions (each with all its games and models), not of
rows. Features are not centred, so that answers of the same style are compared even with a single model.
Functions with style control need rows with styles.

The weights are defined in `rlhf_core.mean_interval`: Dirichlet(1, ..., 1) over the questions and one
additional question. The additional question has two halves, each either won or lost by all models, with
answers whose style is one standard deviation above or below each model's average. Thus a few equal verdicts
still have an interval, and the style effects are as uncertain as the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit

from evaluation.scores.bradley_terry import RIDGE, STYLE_RIDGE, fit, one_hot
from evaluation.scores.scoring import Floats, arena_sums, plain_sums
from evaluation.scores.style import FEATURES, Control, Style, columns, features, scaled
from rlhf_core.records import Judgment

Styles = Mapping[tuple[str, str], Style]  # (model, uid) -> style of its answer


class IntervalEstimate(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


class BattleRows(NamedTuple):
    """N rows: the model's outcomes in [0, 1] and the weights, (N,) each, the question and model of each row,
    and style features if known. `heaviest`: the largest weight that a row can have."""

    uids: list[str]
    models: list[str]
    outcomes: Floats
    weights: Floats
    features: Floats | None  # (N, 4)
    heaviest: float = 1.0

    def sorted(self) -> BattleRows:
        """Returns the rows ordered by question and model."""
        order = np.lexsort((self.models, self.uids))
        return BattleRows(
            [self.uids[i] for i in order],
            [self.models[i] for i in order],
            self.outcomes[order],
            self.weights[order],
            None if self.features is None else self.features[order],
            self.heaviest,
        )


class Controlled(NamedTuple):
    """Style-controlled scores by model, and the effect of each feature: the change in log-odds for a
    difference of typical size (root mean square)."""

    scores: dict[str, IntervalEstimate]
    effects: dict[str, IntervalEstimate]


def question_rows(judgments: Sequence[Judgment], styles: Styles | None, arena: bool) -> BattleRows:
    """Returns one row for each battle with a verdict. With `arena`, each game has weight 1, or 3 if its
    verdict is strong; otherwise the battle has weight 1 and its outcome is the mean of its games, as in
    `scoring.plain_sums`. Raises ValueError when no game has a verdict or an answer's style is missing."""
    found = [judgment for judgment in judgments if judgment.score is not None]
    if not found:
        raise ValueError("no game has a verdict, so there is no score: see the judgments for the reason")
    sums = [(arena_sums if arena else plain_sums)([judgment]) for judgment in found]
    values = None
    if styles is not None:
        values = features(
            [_style(styles, j.model, j.uid) for j in found],
            [_style(styles, j.baseline, j.uid) for j in found],
        )
    outcomes = np.array([each.score for each in sums])
    weights = np.array([each.weight[0] for each in sums])
    heaviest = max(each.heaviest for each in sums)
    return BattleRows([j.uid for j in found], [j.model for j in found], outcomes, weights, values, heaviest)


def controlled(rows: BattleRows, controls: Sequence[Control], resamples: int, seed: int) -> Controlled:
    """Returns each model's score against the baseline for answers of the same style, with 95 % intervals.

    `rows` come from `question_rows`. All models share the style effects. `resamples`: number of random
    weightings of the questions.
    """
    rows = rows.sorted()  # so that sums do not depend on the order of the files
    assert rows.features is not None, "style control needs the styles of the answers"
    values = scaled(rows.features[:, columns(controls)])
    indicators, names = one_hot(rows.models)
    models = len(names)
    rows_of_model = indicators * rows.weights[:, None]  # (N, M)
    shares = rows_of_model / rows_of_model.sum(0)
    average = shares.T @ values  # (M, F)
    spread = np.sqrt(np.maximum(shares.T @ values**2 - average**2, 0))
    # the halves of the added question: (2, M, M + F)
    halves = [np.hstack([np.eye(models), average + sign * spread]) for sign in (1, -1)]
    # each half won, then each half lost
    design = np.vstack([np.hstack([indicators, values]), *halves, *halves])
    outcomes = np.append(rows.outcomes, np.repeat((1.0, 0.0), 2 * models))
    ridge = np.repeat((RIDGE, STYLE_RIDGE), [models, values.shape[1]])
    # (1 + R, M + F)
    coefficients = fit(design, outcomes, _weights(rows, models, resamples, seed), ridge)
    chances = expit(coefficients[:, :models])
    effects = coefficients[:, models:]
    return Controlled(
        {name: _estimate(chances[:, i]) for i, name in enumerate(names)},
        {FEATURES[column]: _estimate(effects[:, i]) for i, column in enumerate(columns(controls))},
    )


def _weights(rows: BattleRows, models: int, resamples: int, seed: int) -> Floats:
    """Returns weights of all rows and of the added rows, (1 + R, N + 4 M). The first weighting is the data
    itself, without the added question; the others are in four parts, which differ in the halves that are
    won."""
    uids, index = np.unique(rows.uids, return_inverse=True)
    draws = (resamples + 3) // 4
    drawn = np.random.default_rng(seed).standard_exponential((draws, len(uids) + 1))
    known = drawn[:, index] * rows.weights
    half = np.repeat(drawn[:, -1:] * rows.heaviest / 2, models, axis=1)
    own = np.append(rows.weights, np.zeros(4 * models))
    parts = [
        np.hstack([known, half * a, half * b, half * (1 - a), half * (1 - b)]) for a in (1, 0) for b in (1, 0)
    ]
    return np.vstack([own, *parts])


def _estimate(values: Floats) -> IntervalEstimate:
    """Returns the first value as the estimate, with the 2.5th and 97.5th percentiles of the other values,
    which come from random weights."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return IntervalEstimate(float(values[0]), float(low), float(high))


def _style(styles: Styles, model: str, uid: str) -> Style:
    if (model, uid) not in styles:
        raise ValueError(
            f"style control needs the answer of {model} to question {uid}, but it is missing: give the folder"
            " of the model's answers"
        )
    return styles[model, uid]
