"""Counts how many of the answers to each prompt of a curriculum were correct, and computes the prompt's
weight from these counts.

The learnability of a prompt with pass rate p is p (1 - p), the variance of a reward of 0 or 1. Without
variance, answers teach nothing (Foster et al. 2025, "Learning to Reason at the Frontier of Learnability",
arXiv:2502.12272). A few answers say little about p. The weight is therefore an expectation under the
posterior of p, the beta distribution that follows from a uniform prior.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import gammaln


class PassCounts(NamedTuple):
    """Holds the counts of each prompt, (N,) float64: answers that were `right`, and answers with a reward
    (`answered`). Also holds whether all answers of the last group were right, (N,) bool."""

    right: np.ndarray
    answered: np.ndarray
    solved: np.ndarray


def counts_before(rates: np.ndarray, answers: int) -> PassCounts:
    """Returns the counts before a run. `rates` (N,) holds known pass rates, or nan; each counts as if
    measured on this many `answers`."""
    known = ~np.isnan(rates)
    answered = np.where(known, float(answers), 0.0)
    return PassCounts(np.where(known, rates, 0.0) * answered, answered, known & (rates >= 1))


def count_group(counts: PassCounts, prompt: int, right: int, answered: int, n: int, discount: float) -> None:
    """Adds the `n` answers to a prompt, and multiplies its earlier counts by `discount`. Answers without a
    reward are not `answered`. A group of only such answers changes nothing; a group with even one of them
    does not count as solved."""
    if not answered:
        return
    counts.right[prompt] = discount * counts.right[prompt] + right
    counts.answered[prompt] = discount * counts.answered[prompt] + answered
    counts.solved[prompt] = right == n


def weights_of(counts: PassCounts, target: float, prompts: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Returns the weight of each of the `prompts`, all above 0. The weight is the mean of p^(2 target) (1 -
    p)^(2 - 2 target) over the pass rate p. Its beta distribution has the parameters right + 1 and wrong + 1.

    With a target of 0.5 this is the expected learnability, a b / ((a + b) (a + b + 1)). In general, the
    weight is largest at a known pass rate of `target`.
    """
    a = counts.right[prompts] + 1
    b = counts.answered[prompts] - counts.right[prompts] + 1
    more_a = 2 * target
    more_b = 2 - 2 * target
    # B(a + more_a, b + more_b) / B(a, b), where more_a + more_b is 2
    logs = gammaln(a + more_a) - gammaln(a) + gammaln(b + more_b) - gammaln(b)
    return np.exp(logs) / ((a + b) * (a + b + 1))
