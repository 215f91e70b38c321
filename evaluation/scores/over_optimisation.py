"""Detects over-optimisation of a reward model: compares the scores of the reward model used for training (the
proxy) with the win rates, as functions of the KL.

The curve is defined by Gao, Schulman & Hilton 2022 (arXiv:2210.10760, figure 1, drawn over the square root of
the KL). The KL is measured from the initial model of the training. Scores, win rates and KL are measured on
the same questions and answers, sampled at temperature 1. The KL is the mean over answers of `log p(answer |
model) - log p(answer | baseline)`, in nats per answer, which is unbiased on the model's own samples. A
limitation is that answers are stored as text and tokenised again, which may not give the sampled tokens. A
point is suspicious when the proxy's score is higher, and the judge's score lower, than at the best earlier
point of its chain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evaluation.scores.scoring import QuestionSums, bootstrap_interval, difference_interval
from rlhf_core.records import Frozen, Judgment, WinRate

FILE = "over_optimisation.json"
IN_CHAIN = re.compile(r"(.+)\.(?:round|iteration)[0-9]+")  # a round of a loop or a checkpoint of a PPO stage
Floats = NDArray[np.float64]
Suspicion = Literal["none", "possible", "sure"]


class Point(Frozen):
    """One model: its KL from the baseline (nats per answer) and the proxy's mean score, each with its
    standard error, and the judge's win rate with its 95 % interval. `suspicion`: whether the proxy's score
    rose and the win rate fell relative to the model `since`: `possible` if the means did, `sure` if the
    intervals of both differences, over the same questions, exclude zero (95 %, Bonferroni-corrected)."""

    model: str
    chain: str
    kl: float
    kl_error: float
    proxy: float
    proxy_error: float
    win_rate: float
    ci_low: float
    ci_high: float
    suspicion: Suspicion = "none"
    since: str | None = None


class OverOptimisation(Frozen):
    """The curve of one evaluation. The baseline is the first point; the points of a chain are in training
    order."""

    proxy: str
    baseline: str
    judge: str
    points: tuple[Point, ...]


class QuestionValues(NamedTuple):
    """Values of one model by question, (Q,) each: the log-prob ratio of its answer, the proxy's score, and
    the judge's score (nan without a verdict)."""

    kl: Floats
    proxy: Floats
    battle: Floats


def battle_scores(judgments: Sequence[Judgment], model: str, baseline: str, uids: Sequence[str]) -> Floats:
    """Returns a model's score against the baseline on each question, (Q,); nan without a verdict."""
    scores = {j.uid: j.score for j in judgments if (j.model, j.baseline) == (model, baseline)}
    return np.array([np.nan if (score := scores.get(uid)) is None else score for uid in uids])


def curve(
    proxy: str,
    baseline: str,
    measured: Mapping[str, QuestionValues],
    rates: Mapping[str, WinRate],
    resamples: int,
    seed: int,
) -> OverOptimisation:
    """Returns the points of all models in `measured` that have a win rate. `measured` includes the baseline,
    with a KL of 0 and battle scores of 0.5."""
    points: list[Point] = []
    start = _point(baseline, baseline, measured[baseline], None)
    chains: dict[str, list[Point]] = {}
    for model, values in measured.items():
        if model == baseline or model not in rates:
            continue
        found = IN_CHAIN.fullmatch(model)
        earlier = chains.setdefault(found[1] if found else model, [start])
        point = _point(model, found[1] if found else model, values, rates[model])
        best = max(earlier, key=lambda other: other.win_rate)
        level = 1 - 0.05 / len(earlier)  # because the best of several is partly lucky (Bonferroni)
        suspicion = suspicion_of(measured[best.model], values, resamples, seed, level)
        points.append(
            point.model_copy(
                update={"suspicion": suspicion, "since": None if suspicion == "none" else best.model}
            )
        )
        earlier.append(points[-1])
    judge = next(iter(rates.values())).judge
    return OverOptimisation(proxy=proxy, baseline=baseline, judge=judge, points=(start, *points))


def suspicion_of(
    before: QuestionValues, after: QuestionValues, resamples: int, seed: int, level: float = 0.95
) -> Suspicion:
    """Tests whether the proxy's score rises and the judge's falls from `before` to `after`, on questions
    where both have a verdict. Returns "sure" if the intervals at `level` exclude 0."""
    judged = np.isfinite(before.battle) & np.isfinite(after.battle)
    if not judged.any():
        return "none"
    rise = (after.proxy - before.proxy)[judged]
    fall = (before.battle - after.battle)[judged]
    if rise.mean() <= 0 or fall.mean() <= 0:
        return "none"
    rise_low, _ = bootstrap_interval(QuestionSums(rise, np.ones(len(rise))), resamples, seed, level)
    fall_low, _ = difference_interval(fall, level)
    return "sure" if min(rise_low, fall_low) > 0 else "possible"


def metrics(found: OverOptimisation) -> dict[str, float]:
    """Returns `kl/MODEL`, `proxy/MODEL` and `over_optimised/MODEL` (1 when sure, else 0) for gates."""
    values = {
        f"{name}/{point.model}": getattr(point, name) for point in found.points for name in ("kl", "proxy")
    }
    return values | {
        f"over_optimised/{point.model}": float(point.suspicion == "sure") for point in found.points
    }


def _point(model: str, chain: str, values: QuestionValues, rate: WinRate | None) -> Point:
    share, low, high = (0.5, 0.5, 0.5) if rate is None else (rate.win_rate, rate.ci_low, rate.ci_high)
    errors = [
        float(part.std(ddof=1) / np.sqrt(len(part))) if len(part) > 1 else 0.0
        for part in (values.kl, values.proxy)
    ]
    return Point(
        model=model, chain=chain, kl=float(values.kl.mean()), kl_error=errors[0],
        proxy=float(values.proxy.mean()), proxy_error=errors[1],
        win_rate=share, ci_low=low, ci_high=high,
    )  # fmt: skip
