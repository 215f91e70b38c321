"""Computes style-controlled scores of Arena-Hard's battles. Pure functions of judgments and seeds.

Fits Bradley-Terry with style features like arena-hard-auto (`show_result.py`, 2025-06), with two
differences. The bootstrap resamples questions (all their games and models together), not rows. Features are
not centred, so that answers of the same style are compared even with a single model. Functions with style
control need rows with styles.
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
    """N rows: outcomes in [0, 1] for the model and weights, (N,), each row's question and model, and style
    features if known."""

    uids: list[str]
    models: list[str]
    outcomes: Floats
    weights: Floats
    features: Floats | None  # (N, 4)


class Controlled(NamedTuple):
    """Style-controlled scores by model, and the effect of each feature: how much the log-odds change for a
    difference of typical size (root mean square)."""

    scores: dict[str, IntervalEstimate]
    effects: dict[str, IntervalEstimate]


def question_rows(judgments: Sequence[Judgment], styles: Styles | None, arena: bool) -> BattleRows:
    """Returns one row for each battle with a verdict. With `arena`, each game has weight 1, or 3 if its
    verdict is strong; otherwise the battle has weight 1 and its outcome is the mean of its games, as in
    `scoring.plain_sums`. Raises ValueError when no game has a verdict or an answer's style is missing."""
    found = [judgment for judgment in judgments if judgment.score is not None]
    if not found:
        raise ValueError("no game has a verdict, so there is no score: look at the judgments for the reason")
    sums = [(arena_sums if arena else plain_sums)([judgment]) for judgment in found]
    values = None
    if styles is not None:
        values = features(
            [_style(styles, j.model, j.uid) for j in found],
            [_style(styles, j.baseline, j.uid) for j in found],
        )
    outcomes = np.array([each.score for each in sums])
    weights = np.array([each.weight[0] for each in sums])
    return BattleRows([j.uid for j in found], [j.model for j in found], outcomes, weights, values)


def controlled(rows: BattleRows, controls: Sequence[Control], resamples: int, seed: int) -> Controlled:
    """Computes style control: each model's score against the baseline for answers of the same style, with
    95 % intervals.

    `rows` come from `question_rows`. All models share the effects of style; each of the `resamples` draws
    questions with all their rows.
    """
    assert rows.features is not None, "style control needs the styles of the answers"
    values = scaled(rows.features[:, columns(controls)])
    uids, index = np.unique(rows.uids, return_inverse=True)
    order = np.lexsort((rows.models, rows.uids))  # makes sums independent of the order of the files
    sorted_rows = BattleRows(
        [rows.uids[i] for i in order],
        [rows.models[i] for i in order],
        rows.outcomes[order],
        rows.weights[order],
        rows.features[order],
    )
    # (R, Q)
    drawn = np.random.default_rng(seed).multinomial(
        len(uids), np.full(len(uids), 1 / len(uids)), size=resamples
    )
    weights = np.vstack([np.ones((1, len(uids))), drawn])[:, index[order]] * sorted_rows.weights
    indicators, names = one_hot(sorted_rows.models)
    ridge = np.repeat((RIDGE, STYLE_RIDGE), [len(names), values.shape[1]])
    # (1 + R, M + F)
    coefficients = fit(np.hstack([indicators, values[order]]), sorted_rows.outcomes, weights, ridge)
    chances = expit(coefficients[:, : len(names)])
    effects = coefficients[:, len(names) :]
    return Controlled(
        {name: _estimate(chances[:, i]) for i, name in enumerate(names)},
        {FEATURES[column]: _estimate(effects[:, i]) for i, column in enumerate(columns(controls))},
    )


def _estimate(values: Floats) -> IntervalEstimate:
    """Returns the first value with the 2.5 % and 97.5 % quantiles of the others, which are its bootstrap
    values."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return IntervalEstimate(float(values[0]), float(low), float(high))


def _style(styles: Styles, model: str, uid: str) -> Style:
    if (model, uid) not in styles:
        raise ValueError(
            f"style control needs the answer of {model} to question {uid}, and there is none: give the folder"
            " of its answers"
        )
    return styles[model, uid]
