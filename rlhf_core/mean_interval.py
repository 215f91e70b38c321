"""Computes the interval of a mean of scores from 0 to 1, such as a win rate, an accuracy or a fraction.
Nothing is random.

The method is the Bayesian bootstrap (Rubin 1981) with one half-won question added; no paper describes exactly
this method.

The scores of n questions are a sample of an unknown distribution on [0, 1]. One more question is added, won
or lost with probability one half each, and the n + 1 questions get weights from Dirichlet(1, ..., 1). The
ends of the interval are quantiles of the weighted mean.

- With scores 0 and 1 alone it is the mid-P interval of a proportion (Lancaster 1961; Berry & Armitage 1995).
- With the added question always lost for the lower end, and always won for the upper one, it would be
  Gaffke's bound (2005; Learned-Miller & Thomas 2019, arXiv:1905.06208). That is Clopper & Pearson's interval
  for a proportion, and wider than it needs to be.
- A lower score lowers the mean for any weights, so it raises neither end.

Dirichlet weights are independent exponential variables divided by their sum. Hence "the weighted mean is at
most mu" says that a sum of gamma variables is at most 0. Its probability is an integral (Gil-Pelaez 1951;
Imhof 1961).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Floats = NDArray[np.float64]
STEP = 0.02  # of the integral
COARSE = 16  # every 16th point says how far the integral goes
NOTHING = -40.0  # logarithm of what is left out
# Standard deviations from 0 beyond which a probability counts as 0 or 1. It is below e^-29, because the
# density of the sum is log-concave.
FAR = 30.0
# Points and weights of the integral of f(u) du / (pi u) over u > 0: the double exponential rule with
# u = exp(x - exp(-x)) (Takahasi & Mori 1974).
_X = np.arange(-4.5, 32, STEP)
POINTS = np.exp(_X - np.exp(-_X))
WEIGHTS = (1 + np.exp(-_X)) * STEP / np.pi


def mean_interval(
    total: Floats, weight: Floats, added: float = 1.0, level: float = 0.95
) -> tuple[float, float]:
    """Returns the interval of `total.sum() / weight.sum()`; without a question it is (0, 1).

    `weight` (n,) is the weight of each question, `total` (n,) its score times its weight. `added` is the
    weight of the added question, which should equal the largest weight of the others.
    """
    tail = (1 - level) / 2
    return _lower(total, weight, added, tail), 1 - _lower(weight - total, weight, added, tail)


def _lower(total: Floats, weight: Floats, added: float, tail: float) -> float:
    """Returns the `tail` quantile of the weighted mean."""
    questions, counts = np.unique(np.stack([total, weight], axis=1), axis=0, return_counts=True)
    shapes = np.append(counts, 1.0)

    def excess(mu: float) -> float:
        above = questions[:, 0] - mu * questions[:, 1]
        lost, won = (_at_most_zero(np.append(above, added * (score - mu)), shapes) for score in (0.0, 1.0))
        return (lost + won) / 2 - tail

    return 0.0 if excess(0.0) >= 0 else float(brentq(excess, 0.0, 1.0, xtol=1e-12))


def _at_most_zero(scales: Floats, shapes: Floats) -> float:
    """Returns P(sum of `scales` times independent gamma variables of `shapes` is at most 0), both (K,)."""
    if (scales <= 0).all():
        return 1.0
    if (scales >= 0).all():
        return 0.0
    mean = float(shapes @ scales)
    deviation = float(np.sqrt(shapes @ scales**2))
    if abs(mean) > FAR * deviation:
        return float(mean < 0)
    scales = scales / deviation
    end = COARSE * (1 + np.count_nonzero(_log_damping(scales, shapes, POINTS[::COARSE]) > NOTHING))
    points = POINTS[:end]
    phase = shapes @ np.arctan(np.outer(scales, points))
    return float(0.5 - np.sin(phase) * np.exp(_log_damping(scales, shapes, points)) @ WEIGHTS[:end])


def _log_damping(scales: Floats, shapes: Floats, points: Floats) -> Floats:
    """Returns the logarithm of the modulus of the sum's characteristic function, (points,), which
    decreases."""
    return -shapes @ np.log1p(np.outer(scales, points) ** 2) / 2
