"""Computes Arena-Hard's scores as arena-hard-auto does ("reference"), and with our statistics. Pure functions of judgments and seeds.

The reference (`show_result.py`, 2025-06, for v2.0) makes each game a row, a strong verdict three rows, leaves a battle out when one of its
games failed, and resamples rows as if they were independent. Its raw score is the mean of 100 bootstraps with their 5 % and 95 %
quantiles; its style-controlled score is a Bradley-Terry fit with z-scored style features, the median of 100 bootstraps.
Our statistics resample questions (all their games and models together) with a seed, and do not centre the features, so that style
control compares answers of the same style, also with one model. `indices` are the row numbers of each bootstrap.
Left out: the statistics of v0.1. Functions with style control need rows with styles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from evaluation.scores.bradley_terry import NO_RIDGE, RIDGE, STYLE_RIDGE, fit, one_hot
from evaluation.scores.scoring import STRONG_ROWS, Floats, arena_clusters
from evaluation.scores.style import FEATURES, Control, Style, columns, features, scaled, standardised
from rlhf_core.records import Judgment

Indices = NDArray[np.int64]
Styles = Mapping[tuple[str, str], Style]  # (model, uid) -> style of its answer
REFERENCE_ROUNDS = 100


class Estimate(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


class Rows(NamedTuple):
    """N rows: outcomes in [0, 1] for the model and weights, (N,), each row's question and model, and style features when known."""

    uids: list[str]
    models: list[str]
    outcomes: Floats
    weights: Floats
    features: Floats | None  # (N, 4)


class Controlled(NamedTuple):
    """Style-controlled scores by model, and the effect of each feature: the change of the log-odds by a difference of its typical size
    (root mean square; reference: standard deviation)."""

    scores: dict[str, Estimate]
    effects: dict[str, Estimate]


def reference_rows(judgments: Sequence[Judgment], styles: Styles | None = None) -> Rows:
    """Returns the reference's rows in its order: for each judgment game 1's, then game 0's. Raises ValueError when no game has a verdict or
    an answer's style is missing."""
    rows = [
        (judgment, score)
        for judgment in judgments
        if None not in judgment.scores
        for game, score in zip(judgment.games[::-1], judgment.scores[::-1], strict=True)
        if score is not None
        for _ in range(STRONG_ROWS if game.score in ("A>>B", "B>>A") else 1)
    ]
    judged, scores = [judgment for judgment, _ in rows], [score for _, score in rows]
    return _rows(judged, scores, [1.0] * len(rows), styles)


def question_rows(judgments: Sequence[Judgment], styles: Styles | None, arena: bool) -> Rows:
    """Returns one row for each battle with a verdict. With `arena` each game has weight 1, a strong one 3; else the battle has weight 1
    and its outcome is the mean of its games, as in `scoring.plain_clusters`. Raises ValueError as `reference_rows`."""
    found = [judgment for judgment in judgments if judgment.score is not None]
    if not arena:
        return _rows(found, [judgment.score for judgment in found if judgment.score is not None], [1.0] * len(found), styles)
    clusters = [arena_clusters([judgment]) for judgment in found]
    return _rows(found, [cluster.score for cluster in clusters], [float(cluster.weight[0]) for cluster in clusters], styles)


def reference_raw(outcomes: Floats, indices: Indices) -> Estimate:
    """Computes v2.0's score of one model from its outcomes (N,) and `indices` (R, N)."""
    return _quantiles(outcomes[indices].mean(1), "mean", 0.05)


def reference_controlled(rows: Rows, controls: Sequence[Control], indices: Indices) -> Controlled:
    """Computes v2.0's style control over all models of a category; `indices` (R, N) are of all rows."""
    assert rows.features is not None, "style control needs the styles of the answers"
    return _controlled(
        rows, standardised(rows.features[:, columns(controls)]), controls, _counts(indices), (NO_RIDGE, NO_RIDGE), "median", 0.05
    )


def controlled(rows: Rows, controls: Sequence[Control], rounds: int, seed: int) -> Controlled:
    """Computes our style control: each model's score against the baseline for answers of the same style, with 95 % intervals.

    `rows` are those of `question_rows`. All models share the effects of style; `rounds` bootstraps resample questions with all their rows.
    """
    assert rows.features is not None, "style control needs the styles of the answers"
    values = scaled(rows.features[:, columns(controls)])
    uids, index = np.unique(rows.uids, return_inverse=True)
    order = np.lexsort((rows.models, rows.uids))  # sums do not depend on the order of the files
    sorted_rows = Rows(
        [rows.uids[i] for i in order], [rows.models[i] for i in order], rows.outcomes[order], rows.weights[order], rows.features[order]
    )
    drawn = np.random.default_rng(seed).multinomial(len(uids), np.full(len(uids), 1 / len(uids)), size=rounds)  # (R, Q)
    weights = np.vstack([np.ones((1, len(uids))), drawn])[:, index[order]] * sorted_rows.weights
    return _controlled(sorted_rows, values[order], controls, weights, (RIDGE, STYLE_RIDGE), "first", 0.025)


def seeded_indices(count: int, rounds: int, seed: int) -> Indices:
    """Returns (R, N) row numbers drawn with replacement, as the reference does, but with a seed."""
    return np.random.default_rng(seed).integers(count, size=(rounds, count))


def _controlled(
    rows: Rows, values: Floats, controls: Sequence[Control], weights: Floats, ridges: tuple[float, float], centre: str, tail: float
) -> Controlled:
    indicators, names = one_hot(rows.models)
    ridge = np.repeat(ridges, [indicators.shape[1], values.shape[1]])
    coefficients = fit(np.hstack([indicators, values]), rows.outcomes, weights, ridge)  # (R, M + F)
    chances, effects = expit(coefficients[:, : len(names)]), coefficients[:, len(names) :]
    return Controlled(
        {name: _quantiles(chances[:, i], centre, tail) for i, name in enumerate(names)},
        {FEATURES[column]: _quantiles(effects[:, i], centre, tail) for i, column in enumerate(columns(controls))},
    )


def _quantiles(values: Floats, centre: str, tail: float) -> Estimate:
    """Returns the estimate and its quantiles. `centre` "first": the first value is the estimate, the others are bootstraps."""
    rounds = values[1:] if centre == "first" else values
    middle = values[0] if centre == "first" else values.mean() if centre == "mean" else np.median(values)
    low, high = np.quantile(rounds, [tail, 1 - tail])
    return Estimate(float(middle), float(low), float(high))


def _counts(indices: Indices) -> Floats:
    """Returns how often each row was drawn, (R, N)."""
    return np.stack([np.bincount(drawn, minlength=indices.shape[1]) for drawn in indices]).astype(np.float64)


def _rows(judgments: Sequence[Judgment], outcomes: Sequence[float], weights: Sequence[float], styles: Styles | None) -> Rows:
    if not judgments:
        raise ValueError("no game has a verdict, so there is no score: look at the judgments for the reason")
    values = None
    if styles is not None:
        values = features([_style(styles, j.model, j.uid) for j in judgments], [_style(styles, j.baseline, j.uid) for j in judgments])
    return Rows([j.uid for j in judgments], [j.model for j in judgments], np.array(outcomes, np.float64), np.array(weights), values)


def _style(styles: Styles, model: str, uid: str) -> Style:
    if (model, uid) not in styles:
        raise ValueError(f"style control needs the answer of {model} to question {uid}, and there is none: give the folder of its answers")
    return styles[model, uid]
