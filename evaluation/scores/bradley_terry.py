"""Fits Bradley-Terry strengths with covariates (Bradley & Terry 1952) by logistic regression, for many
weightings of the same rows.

arena-hard-auto minimises the same convex loss with L-BFGS. Newton's method reaches the same minimum and fits
all resamples together. A ridge penalty keeps strengths finite when a model wins everything. The loss is a
mean, so repeating all rows has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

RIDGE = 1e-5  # limits the score of a model that always wins to about 99.99 %
# for features of unit size; if a model always has the same style, its wins count towards its strength
STYLE_RIDGE = 1e-3
STEPS = 100
HALVINGS = 30
GRADIENT = 1e-10
CELLS = 1 << 22  # most weights in memory at once: 32 MB


def one_hot(names: Sequence[str]) -> tuple[Floats, list[str]]:
    """Returns the (N, M) indicators of each row's model, and the M names, sorted. The baseline has strength
    0 in all rows."""
    unique, index = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    return np.eye(len(unique))[index], [str(name) for name in unique]


def fit(design: Floats, outcomes: Floats, weights: Floats, ridge: Floats) -> Floats:
    """Returns coefficients c (R, P). Row r minimises the mean cross-entropy under weights[r] plus sum(ridge *
    c^2) / 2.

    `design` (N, P), `ridge` (P,), `outcomes` (N,) in [0, 1] (a tie is 0.5: half a win and half a loss),
    `weights` (R, N), each row with a positive sum.
    """
    step = max(1, CELLS // max(1, design.shape[0]))
    parts = [
        _fit(design, outcomes, weights[start : start + step], ridge) for start in range(0, len(weights), step)
    ]
    return np.concatenate(parts)


def _fit(design: Floats, outcomes: Floats, weights: Floats, ridge: Floats) -> Floats:
    weights = weights / weights.sum(1, keepdims=True)
    resamples = len(weights)
    size = design.shape[1]
    squares = (design[:, :, None] * design[:, None, :]).reshape(len(design), size * size)
    coefficients = np.zeros((resamples, size))
    loss = _loss(coefficients, design, outcomes, weights, ridge)
    for _ in range(STEPS):
        chances = expit(coefficients @ design.T)  # (R, N)
        gradient = (weights * (chances - outcomes)) @ design + ridge * coefficients
        if np.abs(gradient).max() < GRADIENT:
            break
        curvature = ((weights * chances * (1 - chances)) @ squares).reshape(resamples, size, size) + np.diag(
            ridge
        )
        step = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        length = np.ones((resamples, 1))
        for _ in range(HALVINGS):
            moved = _loss(coefficients - length * step, design, outcomes, weights, ridge)
            worse = moved > loss + 1e-14
            if not worse.any():
                break
            length[worse] /= 2
        coefficients = coefficients - length * step
        loss = moved
    return coefficients


def _loss(coefficients: Floats, design: Floats, outcomes: Floats, weights: Floats, ridge: Floats) -> Floats:
    """Returns the loss for each row of weights, (R,)."""
    logits = coefficients @ design.T
    losses: Floats = (weights * (np.logaddexp(0, logits) - outcomes * logits)).sum(
        1
    ) + coefficients**2 @ ridge / 2
    return losses
