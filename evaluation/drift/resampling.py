"""Computes bootstrap intervals of means, ratios and rank correlations, vectorised over the resamples.
Torch-free.

Intervals are 95 % percentile bootstrap intervals (Efron & Tibshirani 1993, ch. 13) over rows: prompts,
questions or pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Floats = NDArray[np.float64]
ENDS = (0.025, 0.975)


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


def weights(rows: int, resamples: int, generator: np.random.Generator) -> Floats:
    """Returns the weight of each row in each resample, (resamples, rows)."""
    return generator.multinomial(rows, np.full(rows, 1 / rows), size=resamples) / rows


def ends(values: Floats) -> Interval:
    """Returns the 2.5th and 97.5th percentiles. Ignores resamples without a value."""
    low, high = np.nanquantile(values, ENDS)
    return Interval(float(low), float(high))


def mean(values: Floats, resamples: int, seed: int) -> Interval:
    """Returns the interval of the mean of `values` (N,)."""
    return ends(weights(len(values), resamples, np.random.default_rng(seed)) @ values)


def paired_ratio(above: Floats, below: Floats, resamples: int, seed: int) -> Interval:
    """Returns the interval of mean(above) / mean(below) for rows that have both values, (N,) each."""
    drawn = weights(len(above), resamples, np.random.default_rng(seed))
    return ends((drawn @ above) / (drawn @ below))


def ratio(above: Floats, below: Floats, resamples: int, seed: int) -> Interval:
    """Returns the interval of mean(above) / mean(below) for two independent samples, (N,) and (M,)."""
    generator = np.random.default_rng(seed)
    one, other = (weights(len(values), resamples, generator) @ values for values in (above, below))
    return ends(one / other)


def spearman(one: Floats, other: Floats) -> Floats:
    """Returns Spearman's rank correlation for each row of two (R, N) arrays, (R,); nan where all values in a
    row are equal."""
    ranks = [rankdata(values, axis=1) for values in (one, other)]
    a, b = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), scale, out=np.full(len(a), np.nan), where=scale > 0)


def spearman_interval(one: Floats, other: Floats, resamples: int, seed: int) -> Interval:
    """Returns the interval of Spearman's correlation of two (N,) arrays."""
    drawn = np.random.default_rng(seed).integers(len(one), size=(resamples, len(one)))
    return ends(spearman(one[drawn], other[drawn]))
