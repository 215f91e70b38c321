"""Evaluates reward models on held-out preference pairs: accuracy (also by subset), calibration, length bias
and agreement. Torch-free.

A model prefers the answer that it scores higher; equal scores count as half right. Its predicted probability
is the sigmoid of the score difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from evaluation.scores.scoring import Floats, rate_interval, sums_of
from rlhf_core.records import Frozen

REWARD_MODELS = "reward_models.json"


class HeldOutPairs(NamedTuple):
    """N held-out pairs. Intervals are over `prompts`; lengths are in tokens of the answers."""

    prompts: list[str]
    subsets: list[str]
    chosen_tokens: NDArray[np.int64]
    rejected_tokens: NDArray[np.int64]


class Bin(Frozen):
    """A bin of pairs with similar predicted probabilities (of the preferred answer, so at least one half),
    with means over its pairs."""

    pairs: int
    confidence: float
    accuracy: float


class Accuracy(Frozen):
    """The fraction of pairs ranked right, with a 95 % interval over prompts."""

    pairs: int
    accuracy: float
    ci_low: float
    ci_high: float


class RewardReport(Frozen):
    """One reward model.

    `calibration_error` is the expected calibration error (Guo et al. 2017, eq. 3) over `calibration`. Length
    bias is measured over pairs of different length. `longer_preferred` and `longer_chosen` are the fractions
    of pairs in which the model and the data, respectively, prefer the longer answer. There are also the
    accuracy when the chosen answer is longer and when it is shorter (None without such pairs), and Spearman's
    correlation between the differences in score and in length.
    """

    model: str
    overall: Accuracy
    by_subset: dict[str, Accuracy]
    calibration: tuple[Bin, ...]
    calibration_error: float
    longer_preferred: float | None
    longer_chosen: float | None
    accuracy_longer: float | None
    accuracy_shorter: float | None
    length_correlation: float | None


class RewardModelAgreement(Frozen):
    """Two reward models on the same pairs: the fraction of pairs with the same preference, and Spearman's
    correlation of their score differences."""

    first: str
    second: str
    agreement: float
    correlation: float | None


class RewardReports(Frozen):
    """The contents of `reward_models.json`."""

    models: tuple[RewardReport, ...]
    agreement: tuple[RewardModelAgreement, ...]


def evaluate(pairs: HeldOutPairs, differences: Mapping[str, Floats], bins: int) -> RewardReports:
    """Returns the report of each model, and the agreement of each pair of models. `differences[model]` (N,)
    is the model's score of the chosen answer minus its score of the rejected answer."""
    reports = tuple(_report(model, pairs, difference, bins) for model, difference in differences.items())
    agreements = tuple(
        RewardModelAgreement(
            first=one,
            second=other,
            agreement=float((np.sign(differences[one]) == np.sign(differences[other])).mean()),
            correlation=_correlation(differences[one], differences[other]),
        )
        for one, other in combinations(differences, 2)
    )
    return RewardReports(models=reports, agreement=agreements)


def metrics(reports: RewardReports) -> dict[str, float]:
    """Returns `reward_accuracy/<model>`, its interval, `reward_calibration_error/<model>`, ... for the
    stage's result."""
    found: dict[str, float] = {}
    for report in reports.models:
        values = {name: getattr(report.overall, name) for name in ("accuracy", "ci_low", "ci_high")}
        values |= {
            name: getattr(report, name) for name in ("calibration_error", "longer_preferred", "longer_chosen")
        }
        found |= {
            f"reward_{name}/{report.model}": value for name, value in values.items() if value is not None
        }
    return found | {
        f"reward_agreement/{pair.first}/{pair.second}": pair.agreement for pair in reports.agreement
    }


def right(differences: Floats) -> Floats:
    """Returns 1 where the chosen answer scores higher, 0.5 for equal scores, and 0 otherwise, (N,)."""
    return (np.sign(differences) + 1) / 2


def calibration(differences: Floats, bins: int) -> list[Bin]:
    """Returns the bins of [0.5, 1] that have pairs, in order of increasing confidence."""
    confidence = expit(np.abs(differences))
    correct = right(differences)
    index = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    return [
        Bin(
            pairs=int(held.sum()),
            confidence=float(confidence[held].mean()),
            accuracy=float(correct[held].mean()),
        )
        for held in (index == number for number in range(bins))
        if held.any()
    ]


def _report(model: str, pairs: HeldOutPairs, differences: Floats, bins: int) -> RewardReport:
    correct = right(differences)
    curve = calibration(differences, bins)
    longer = np.sign(pairs.chosen_tokens - pairs.rejected_tokens).astype(np.float64)
    uneven = longer != 0
    subsets = np.array(pairs.subsets)
    every = np.ones(len(correct), dtype=bool)
    by_subset = {str(name): _accuracy(pairs.prompts, correct, subsets == name) for name in np.unique(subsets)}
    return RewardReport(
        model=model,
        overall=_accuracy(pairs.prompts, correct, every),
        by_subset=by_subset,
        calibration=tuple(curve),
        calibration_error=sum(part.pairs * abs(part.accuracy - part.confidence) for part in curve)
        / len(correct),
        longer_preferred=_mean(right(differences * longer), uneven),
        longer_chosen=_mean((longer + 1) / 2, uneven),
        accuracy_longer=_mean(correct, longer > 0),
        accuracy_shorter=_mean(correct, longer < 0),
        length_correlation=_correlation(
            differences, (pairs.chosen_tokens - pairs.rejected_tokens).astype(np.float64)
        ),
    )


def _accuracy(prompts: Sequence[str], correct: Floats, held: NDArray[np.bool_]) -> Accuracy:
    sums = sums_of([(prompts[i], float(correct[i]), 1.0) for i in np.flatnonzero(held)])
    low, high = rate_interval(sums)
    return Accuracy(pairs=int(held.sum()), accuracy=sums.score, ci_low=low, ci_high=high)


def _mean(values: Floats, held: NDArray[np.bool_]) -> float | None:
    return float(values[held].mean()) if held.any() else None


def _correlation(one: Floats, other: Floats) -> float | None:
    """Returns Spearman's correlation; None when one of the two is constant."""
    ranks = _ranks(one), _ranks(other)
    return None if any(np.ptp(values) == 0 for values in ranks) else float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Returns ranks from 1; equal values share their mean rank. (`scipy.stats.rankdata` does the same, but
    takes a second to import.)"""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (counts.cumsum() - (counts - 1) / 2)[index]
    return ranks
