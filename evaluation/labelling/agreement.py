"""Measures how far annotators agree with each other and with themselves. All functions are pure.

Two annotators: Cohen's kappa (Cohen 1960) and, with squared weights for the five degrees, weighted kappa
(Cohen 1968). All annotators: Krippendorff's alpha (Krippendorff 2011, "Computing Krippendorff's
Alpha-Reliability"), nominal for the winner and ordinal for the degrees, which allows any number of annotators
per pair. Intervals are 95 % intervals over pairs of answers: `rate_interval` for shares, percentile
bootstraps for kappa and alpha. Annotators are not resampled, so the results describe only these annotators.
If all agree, all resamples are equal, and a kappa's interval is derived from the interval of the agreement
rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from evaluation.labelling.label_records import LABELS, HumanLabel, in_force
from evaluation.scores.arena_hard import IntervalEstimate
from evaluation.scores.scoring import CELLS, Floats, QuestionSums, rate_interval, sums_of
from rlhf_core.data.labels import LabelLine

WINNERS = 3  # A, tie, B
ROUNDS = 1000
LEVEL = 0.95
Metric = Literal["nominal", "ordinal"]
Rated = HumanLabel | LabelLine  # from the labelling page; from a file that may come from elsewhere
Statistic = Callable[[Floats], Floats]  # of tables (R, C, C) -> (R,)


class TwoAnnotators(NamedTuple):
    """Agreement on the `pairs` that both annotators labelled. `same`: the fraction of pairs with the same
    winner. Kappas are None if undefined."""

    one: str
    other: str
    pairs: int
    same: IntervalEstimate
    kappa: IntervalEstimate | None
    weighted_kappa: IntervalEstimate | None


class OneAnnotator(NamedTuple):
    """Statistics of one annotator. `first_side`: among verdicts with a winner, the share that prefer the
    answer shown first (0.5 without bias). `consistent`: the fraction of the `repeats` pairs shown twice that
    got the same winner again. `seconds`: median time per verdict. Values are None if the labels lack the
    data."""

    name: str
    labels: int
    skipped: int
    ties: float
    first_side: IntervalEstimate | None
    repeats: int
    consistent: IntervalEstimate | None
    seconds: float | None


class Agreement(NamedTuple):
    """Agreement of all annotators. `pairs`: number of pairs with a verdict; `shared`: number of pairs
    labelled by two or more annotators. Alphas are None if undefined."""

    pairs: int
    shared: int
    alpha: IntervalEstimate | None
    ordinal_alpha: IntervalEstimate | None
    between: list[TwoAnnotators]
    annotators: list[OneAnnotator]


def agreement(labels: Sequence[Rated], rounds: int = ROUNDS, seed: int = 0) -> Agreement:
    """Returns the agreement over all lines of a labels file. Withdrawn labels do not count."""
    rows = in_force(labels)
    given: dict[str, dict[str, Rated]] = defaultdict(dict)  # by key and annotator
    for row in rows:
        if row.verdict is not None and row.repeat_of is None:
            given[row.key][row.annotator] = row
    shared = [by_annotator for by_annotator in given.values() if len(by_annotator) > 1]
    names = sorted({row.annotator for row in rows})
    return Agreement(
        len(given),
        len(shared),
        krippendorff(
            [[label.winner for label in one.values()] for one in shared], WINNERS, "nominal", rounds, seed
        ),
        krippendorff(
            [[label.strength for label in one.values()] for one in shared],
            len(LABELS),
            "ordinal",
            rounds,
            seed,
        ),
        [
            found
            for pair in combinations(names, 2)
            if (found := _two_annotators(*pair, shared, rounds, seed)) is not None
        ],
        [_one_annotator(name, [row for row in rows if row.annotator == name]) for name in names],
    )


def cohen(
    ratings: Sequence[tuple[int, int]], count: int, metric: Metric, rounds: int = ROUNDS, seed: int = 0
) -> IntervalEstimate | None:
    """Returns Cohen's kappa of two annotators' ratings, which range from 0 to `count` - 1; with the metric
    `ordinal`, weighted by squared distance.

    Returns None if there are no ratings, or if both annotators always gave the same rating, so that chance
    alone gives full agreement.
    """
    places = np.arange(count, dtype=np.float64)
    distance = (places[:, None] != places) * 1.0 if metric == "nominal" else (places[:, None] - places) ** 2

    def kappa(tables: Floats) -> Floats:
        expected = tables.sum(2)[:, :, None] * tables.sum(1)[:, None, :] / tables.sum((1, 2))[:, None, None]
        return 1 - _ratio((tables * distance).sum((1, 2)), (expected * distance).sum((1, 2)))

    cells = np.zeros((len(ratings), count, count))
    for row, (one, other) in enumerate(ratings):
        cells[row, one, other] = 1
    return _estimate(cells, kappa, rounds, seed)


def krippendorff(
    ratings: Sequence[Sequence[int]], count: int, metric: Metric, rounds: int = ROUNDS, seed: int = 0
) -> IntervalEstimate | None:
    """Returns Krippendorff's alpha. `ratings`: for each unit, the ratings by any number of annotators, from 0
    to `count` - 1. Units with one rating are left out.

    Returns None if there are no units or all ratings are equal.
    """
    units = [unit for unit in ratings if len(unit) > 1]
    # coincidences: each ordered pair of a unit's ratings, weighted by 1 / (ratings - 1)
    cells = np.zeros((len(units), count, count))
    for row, unit in enumerate(units):
        counts = np.bincount(unit, minlength=count).astype(np.float64)
        cells[row] = (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)

    def alpha(tables: Floats) -> Floats:
        totals = tables.sum(2)  # (R, C)
        distance = _distances(totals, metric)
        expected = totals[:, :, None] * totals[:, None, :] / np.maximum(totals.sum(1) - 1, 1)[:, None, None]
        return 1 - _ratio((tables * distance).sum((1, 2)), (expected * distance).sum((1, 2)))

    return _estimate(cells, alpha, rounds, seed)


def _distances(totals: Floats, metric: Metric) -> Floats:
    """Returns Krippendorff's squared differences between ratings, (R, C, C). An ordinal difference is the
    number of ratings from one to the other, of which the two ends count by half."""
    count = totals.shape[1]
    if metric == "nominal":
        return np.broadcast_to(1 - np.eye(count), (len(totals), count, count))
    middle = totals.cumsum(1) - totals / 2
    return (middle[:, :, None] - middle[:, None, :]) ** 2


def _ratio(observed: Floats, expected: Floats) -> Floats:
    """Returns the ratio of observed to expected disagreement; NaN if no disagreement is expected."""
    return np.divide(observed, expected, out=np.full_like(observed, np.nan), where=expected > 1e-12)


def _estimate(cells: Floats, statistic: Statistic, rounds: int, seed: int) -> IntervalEstimate | None:
    """Returns the statistic of the summed `cells` (units, C, C), with its interval over resampled units; None
    when it is undefined."""
    if not len(cells):
        return None
    table = cells.sum(0)
    value = float(statistic(table[None])[0])
    if not np.isfinite(value):
        return None
    units = len(cells)
    flat = cells.reshape(len(cells), -1)
    if not (table - np.diag(np.diag(table))).any():
        low, _ = rate_interval(QuestionSums(np.ones(units), np.ones(units)), LEVEL)
        shares = table.sum(1) / table.sum()
        return IntervalEstimate(value, float(1 - (1 - low) / (1 - (shares**2).sum())), 1.0)
    generator = np.random.default_rng(seed)
    found = []
    step = max(1, CELLS // units)
    for start in range(0, rounds, step):
        # draws of each unit, (R, units)
        times = generator.multinomial(units, np.full(units, 1 / units), size=min(step, rounds - start))
        found.append(statistic((times @ flat).reshape(-1, *table.shape)))
    values = np.concatenate(found)
    low, high = np.quantile(values[np.isfinite(values)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return IntervalEstimate(value, float(low), float(high))


def _two_annotators(
    one: str, other: str, shared: Sequence[dict[str, Rated]], rounds: int, seed: int
) -> TwoAnnotators | None:
    both = [
        (by_annotator[one], by_annotator[other])
        for by_annotator in shared
        if one in by_annotator and other in by_annotator
    ]
    same = _share([(a.key, a.winner == b.winner) for a, b in both])
    if same is None:
        return None
    kappa = cohen([(a.winner, b.winner) for a, b in both], WINNERS, "nominal", rounds, seed)
    weighted = cohen([(a.strength, b.strength) for a, b in both], len(LABELS), "ordinal", rounds, seed)
    return TwoAnnotators(one, other, len(both), same, kappa, weighted)


def _one_annotator(name: str, rows: Sequence[Rated]) -> OneAnnotator:
    decided = [row for row in rows if row.verdict is not None]
    firsts = [row for row in decided if row.repeat_of is None]
    by_id = {row.id: row for row in firsts}
    repeats = [(by_id[row.repeat_of], row) for row in decided if row.repeat_of in by_id]
    sided = [row for row in decided if row.winner != 1 and row.shown_first is not None]
    won = [(row.key, row.winner == (0 if row.shown_first == "a" else 2)) for row in sided]
    times = [row.seconds for row in decided if row.seconds is not None]
    return OneAnnotator(
        name,
        len(firsts),
        sum(row.verdict is None for row in rows),
        sum(row.winner == 1 for row in firsts) / max(1, len(firsts)),
        _share(won),
        len(repeats),
        _share([(again.key, first.winner == again.winner) for first, again in repeats]),
        median(times) if times else None,
    )


def _share(rows: Sequence[tuple[str, bool]]) -> IntervalEstimate | None:
    """Returns the fraction of true values, with its interval over pair keys; None if there are no rows."""
    if not rows:
        return None
    sums = sums_of([(key, float(value), 1.0) for key, value in rows])
    return IntervalEstimate(sums.score, *rate_interval(sums, LEVEL))
