"""Measures how far a judge can be trusted: its agreement with people and its biases, with intervals. All
functions are pure.

Signs are 1 (answer A is better), 0 (a tie) and -1 (B). A judge's sign for a pair is the sign of the mean of
its two games, as in an evaluation: games that name different winners make a tie. Every measure is a function
of sums over pairs.

agreement           fraction of pairs with the same sign; a tie for only one of the two is a disagreement
agreement_decided   the same over pairs that neither calls a tie (Zheng et al. 2023, arXiv:2306.05685,
                    setup S2)
kappa               (p - e) / (1 - e): p is the agreement; e is the expected agreement of two raters who draw
A, tie
                    and B at random with their own frequencies (Cohen 1960)
position_bias       fraction of games won by the answer shown first minus the fraction won by the one shown
                    second (Zheng et al. 2023, section 3.3)
swap_consistency    fraction of pairs whose two games name the same winner
length_bias         P(judge prefers the longer answer) - P(people do), over pairs of different length; a tie
                    counts one half
length_error_gap    P(judge prefers the longer | people the shorter) - P(judge prefers the shorter | people
                    the longer), ties as above; also 0 for a judge that errs often but equally in both
                    directions (equalized odds: Hardt et al. 2016, arXiv:1610.02413)
markdown_bias, markdown_error_gap   the same for the answer with more headers, list items and bold text for
                    its length
human_agreement     fraction of pairs of annotators who give the same sign to a pair of answers, averaged over
                    pairs of answers
human_kappa         Fleiss' kappa (1971) of the annotators, over pairs with several annotators
human_repeat        fraction of repeated labels that have the sign of the annotator's first label
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.calibration.calibration_report import Estimate
from evaluation.scores.scoring import CELLS, Floats
from rlhf_core.mean_interval import mean_interval

Signs = NDArray[np.int64]
STYLES = ("length", "markdown")
OVER = {  # for measures that are not means: the term that counts their pairs
    "kappa": "judged",
    "length_error_gap": "length_pairs",
    "markdown_error_gap": "markdown_pairs",
    "human_kappa": "several",
}


class Mean(NamedTuple):
    """A measure that is a mean: the sum and the number of values per uid, (uids,) each, and the smallest
    possible value."""

    sums: Floats
    counts: Floats
    least: float = 0.0


class Observed(NamedTuple):
    """N pairs. `games` (N, 2): the winners of game 0 (A shown first) and game 1 (B shown first): 1 for the
    answer shown first, -1 for the second, 0 for a tie, nan without a verdict. `human`, `longer`, `marked`
    (N,): signs given by people, by length and by markdown. `votes` (N, 3): numbers of annotators who chose A,
    tie, B. `repeats` (N, 2): number of repeated labels, and how many of them have the same sign as the first
    label."""

    uids: Sequence[str]
    games: Floats
    human: Signs
    longer: Signs
    marked: Signs
    votes: Floats
    repeats: Floats


def judge_signs(games: Floats) -> Floats:
    """Returns the judge's sign for each pair, (N,); nan if no game has a verdict."""
    of_a = games * (1, -1)
    played = np.isfinite(of_a)
    signs = np.sign(np.where(played, of_a, 0).sum(1))
    return np.where(played.any(1), signs, np.nan)


def confusion(observed: Observed) -> NDArray[np.int64]:
    """Returns the (3, 3) counts of judged pairs: rows are people's A, tie, B; columns are the judge's."""
    judge = judge_signs(observed.games)
    held = np.isfinite(judge)
    cells = np.zeros((3, 3), np.int64)
    np.add.at(cells, (1 - observed.human[held], 1 - judge[held].astype(int)), 1)
    return cells


def measure(observed: Observed, resamples: int, seed: int) -> dict[str, Estimate]:
    """Returns each measure with its 95 % interval over uids. Leaves out measures for which there are no
    pairs."""
    _, index = np.unique(np.array(observed.uids, dtype=object).astype(str), return_inverse=True)
    terms = _terms(observed)
    sums = np.zeros((int(index.max()) + 1, len(terms)))
    np.add.at(sums, index, np.stack(list(terms.values()), axis=1))
    of_uids = {name: sums[:, k] for k, name in enumerate(terms)}
    found = {name: _mean_estimate(mean) for name, mean in _means(of_uids).items() if mean.counts.any()}
    return found | _resampled(list(terms), sums, resamples, seed)


def _mean_estimate(mean: Mean) -> Estimate:
    """Returns a mean with the interval from `rlhf_core.mean_interval`; values on [-1, 1] are mapped to [0,
    1]."""
    held = mean.counts > 0
    sums = mean.sums[held]
    counts = mean.counts[held]
    span = 1 - mean.least
    ends = mean_interval((sums - mean.least * counts) / span, counts, float(counts.max()))
    low, high = (mean.least + span * end for end in ends)
    return Estimate(value=float(sums.sum() / counts.sum()), ci_low=low, ci_high=high)


def _resampled(names: Sequence[str], sums: Floats, resamples: int, seed: int) -> dict[str, Estimate]:
    """Returns the measures in OVER with percentile bootstrap intervals over uids (Efron & Tibshirani 1993).

    If all resamples are equal, the interval extends from the value in both directions by the width that a
    fraction of 0 or 1 over as many uids would have, so that a few equal verdicts are not taken as proof.
    """
    count = len(sums)
    generator = np.random.default_rng(seed)
    drawn: list[dict[str, Floats]] = []
    step = max(1, CELLS // count)
    for start in range(0, resamples, step):
        weights = generator.multinomial(count, np.full(count, 1 / count), size=min(step, resamples - start))
        drawn.append(_ratios(names, weights @ sums))
    found = {}
    for name, (value,) in _ratios(names, sums.sum(0, keepdims=True)).items():
        values = np.concatenate([part[name] for part in drawn])
        values = values[np.isfinite(values)]
        if not np.isfinite(value) or not len(values):
            continue
        low, high = np.quantile(values, [0.025, 0.975])
        if np.ptp(values) < 1e-12:
            equal = np.ones(int((sums[:, names.index(OVER[name])] > 0).sum()))
            half = 1 - mean_interval(equal, equal)[0]
            low = value - half
            high = value + half
        low = max(-1.0, float(low))
        high = min(1.0, float(high))
        found[name] = Estimate(value=float(value), ci_low=low, ci_high=high)
    return found


def _terms(observed: Observed) -> dict[str, Floats]:
    """Returns each pair's contribution to each sum, (N,), by the sum's name."""
    judge = judge_signs(observed.games)
    human = observed.human
    held = np.isfinite(judge)
    judge = np.where(held, judge, 0)
    terms = {
        f"cell{h}{j}": held * (human == 1 - h) * (judge == 1 - j) * 1.0 for h in range(3) for j in range(3)
    }
    terms |= {"judged": held * 1.0, "decided": held * (human != 0) * (judge != 0) * 1.0}
    both = np.isfinite(observed.games).sum(1) == 2
    first, second = np.where(both[:, None], observed.games, 0).T
    terms |= {
        "both": both * 1.0,
        "first": (first + second) / 2,
        "consistent": both * (first == -second) * 1.0,
    }
    for name, sign in zip(STYLES, (observed.longer, observed.marked), strict=True):
        uneven = held & (sign != 0)
        longer = (judge * sign + 1) / 2  # whether the judge prefers the longer (or more marked-up) answer
        terms |= {
            f"{name}_pairs": uneven * 1.0,
            f"{name}_judge": uneven * longer,
            f"{name}_human": uneven * (human * sign + 1) / 2,
            f"{name}_less": uneven * (human * sign == -1) * 1.0,
            f"{name}_more": uneven * (human * sign == 1) * 1.0,
            f"{name}_for": uneven * (human * sign == -1) * longer,
            f"{name}_against": uneven * (human * sign == 1) * (1 - longer),
        }
    given = observed.votes.sum(1)
    several = given > 1
    same = (observed.votes * (observed.votes - 1)).sum(1) / np.maximum(given * (given - 1), 1)
    terms |= {"several": several * 1.0, "same": several * same}
    terms |= {f"vote{k}": several * observed.votes[:, k] for k in range(3)}
    return terms | {"repeats": observed.repeats[:, 0], "repeated": observed.repeats[:, 1]}


def _means(of: Mapping[str, Floats]) -> dict[str, Mean]:
    """Returns the measures that are means, computed from the terms of each uid."""
    same_winner = of["cell00"] + of["cell22"]
    gaps = {name: of[f"{name}_judge"] - of[f"{name}_human"] for name in STYLES}
    biases = {f"{name}_bias": Mean(gap, of[f"{name}_pairs"], -1.0) for name, gap in gaps.items()}
    return {
        "agreement": Mean(same_winner + of["cell11"], of["judged"]),
        "agreement_decided": Mean(same_winner, of["decided"]),
        "position_bias": Mean(of["first"], of["both"], -1.0),
        "swap_consistency": Mean(of["consistent"], of["both"]),
        **biases,
        "human_agreement": Mean(of["same"], of["several"]),
        "human_repeat": Mean(of["repeated"], of["repeats"]),
    }


def _ratios(names: Sequence[str], sums: Floats) -> dict[str, Floats]:
    """Returns the measures in OVER from (R, K) sums, (R,) each; nan if a measure is undefined."""
    of = {name: sums[:, k] for k, name in enumerate(names)}
    cells = np.stack([of[f"cell{h}{j}"] for h in range(3) for j in range(3)], axis=1).reshape(-1, 3, 3)
    votes = np.stack([of[f"vote{k}"] for k in range(3)], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        agreement = np.trace(cells, axis1=1, axis2=2) / of["judged"]
        chance = (cells.sum(2) * cells.sum(1)).sum(1) / of["judged"] ** 2
        among = of["same"] / of["several"]
        by_chance = ((votes / votes.sum(1, keepdims=True)) ** 2).sum(1)
        gaps = {}
        for name in STYLES:
            wrong_for = of[f"{name}_for"] / of[f"{name}_less"]
            wrong_against = of[f"{name}_against"] / of[f"{name}_more"]
            gaps[f"{name}_error_gap"] = wrong_for - wrong_against
        return {"kappa": _beyond(agreement, chance), **gaps, "human_kappa": _beyond(among, by_chance)}


def _beyond(agreement: Floats, chance: Floats) -> Floats:
    """Returns the agreement beyond chance, divided by its largest possible value; nan if chance alone always
    agrees."""
    return np.where(chance < 1 - 1e-12, (agreement - chance) / (1 - chance), np.nan)
