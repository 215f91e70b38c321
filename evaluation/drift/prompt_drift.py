"""Measures how much current prompts differ from past prompts. Torch-free; uses neither a model nor a
classifier.

Words: the Jensen-Shannon divergence (Lin 1991) in bits, from 0 to 1, of two distributions of hashed words
(Weinberger et al. 2009). Each prompt has the same weight. The divergence of two finite samples from one
distribution is above 0, so its mean over permutations, which mix current and past prompts at random, is
subtracted. The test is a permutation test over prompts (Phipson & Smyth 2010), exact when prompts are
independent. The interval is the spread of bootstrap resamples around the result; it is wide, so gates use the
test. Lengths: the ratio of the means in characters, tested with the two-sample Kolmogorov-Smirnov test.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy
from scipy.stats import ks_2samp

from evaluation.drift.drift_report import Signal
from evaluation.drift.resampling import ENDS, Floats, ratio, weights

BUCKETS = 1024
STEP = 250  # resamples in memory at once
Singles = NDArray[np.float32]


def prompt_signals(present: Sequence[str], past: Sequence[str], rounds: int, seed: int) -> list[Signal]:
    """Returns `prompts/divergence` and `prompts/length`. The strings are complete prompts. Both lists have at
    least one prompt."""
    count = len(present) + len(past)
    lengths = [np.array([len(text) for text in side], dtype=np.float64) for side in (present, past)]
    low, high = ratio(lengths[0], lengths[1], rounds, seed)
    test = ks_2samp(lengths[0], lengths[1])
    length = Signal(
        name="prompts/length",
        value=float(lengths[0].mean() / lengths[1].mean()),
        low=low,
        high=high,
        count=count,
        p=float(test.pvalue),
    )
    return [_divergence(words(present), words(past), rounds, seed), length]


def words(texts: Sequence[str]) -> Singles:
    """Returns the distribution of each text's words over buckets, (N, BUCKETS). Texts without words get a
    separate bucket."""
    found = np.zeros((len(texts), BUCKETS), dtype=np.float32)
    for row, text in enumerate(texts):
        buckets = [
            1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in re.findall(r"\w+", text.lower())
        ] or [0]
        np.add.at(found[row], buckets, 1 / len(buckets))
    return found


def divergence(one: Floats, other: Floats) -> Floats:
    """Returns the Jensen-Shannon divergence in bits of distributions along the last axis."""
    return entropy((one + other) / 2) - (entropy(one) + entropy(other)) / 2


def entropy(shares: Floats) -> Floats:
    """Returns Shannon's entropy in bits along the last axis."""
    return -xlogy(shares, shares).sum(-1) / np.log(2)


def _divergence(present: Singles, past: Singles, rounds: int, seed: int) -> Signal:
    generator = np.random.default_rng(seed)
    every = np.concatenate([present, past])
    total = len(present) + len(past)
    seen = float(divergence(present.mean(0, dtype=np.float64), past.mean(0, dtype=np.float64)))
    permuted = []
    drawn = []
    for start in range(0, rounds, STEP):
        size = min(STEP, rounds - start)
        chosen = generator.permuted(np.tile(np.arange(total) < len(present), (size, 1)), axis=1)
        sums = chosen.astype(np.float32) @ every  # (size, BUCKETS)
        permuted.append(divergence(sums / len(present), (every.sum(0) - sums).clip(0) / len(past)))
        sides = [weights(len(side), size, generator).astype(np.float32) @ side for side in (present, past)]
        drawn.append(divergence(sides[0].astype(np.float64), sides[1].astype(np.float64)))
    null = np.concatenate(permuted)
    again = np.concatenate(drawn)
    value = seen - float(null.mean())
    low, high = (
        value + np.quantile(again, ENDS) - again.mean()
    )  # resamples repeat rows and are more biased than `seen`, so use only their spread
    return Signal(
        name="prompts/divergence",
        value=value,
        low=float(low),
        high=float(high),
        count=total,
        p=float((1 + (null >= seen - 1e-9).sum()) / (1 + rounds)),
    )
