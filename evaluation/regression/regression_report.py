"""Defines the report of a regression suite, `report/regression.json`, and computes the band of earlier
results. Torch-free; all functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal

from rlhf_core.records import Frozen
from rlhf_core.system.markdown_table import table

REGRESSION = "regression.json"
QuestionOutcome = Literal["passed", "failed", "no verdict"]


class QuestionResult(Frozen):
    """A question of the suite, the reason why it is included, and its outcome by model."""

    uid: str
    prompt: str
    reason: str
    source: str
    outcomes: dict[str, QuestionOutcome]


class Band(Frozen):
    """The range that earlier results predict for the fraction of passed questions, from their final models on
    the same questions. `deviation`: the distance of the final model's fraction from `mean`, in units of
    `spread`; `low`, `high`: the ends of the band."""

    results: int
    questions: int
    share: float
    mean: float
    spread: float
    low: float
    high: float
    deviation: float
    outside: bool


class RegressionReport(Frozen):
    """The contents of `regression.json`.

    `final`: the last model of the config; `judge`: identity of the deciding judge
    (config/judging/calibration.py); `before`: outcomes of the final model in the last trusted result, by uid;
    `band`: None if there is no such result.
    """

    baseline: str
    final: str
    models: tuple[str, ...]
    judge: str
    questions: tuple[QuestionResult, ...]
    before: dict[str, QuestionOutcome]
    band: Band | None = None

    @property
    def final_outcomes(self) -> dict[str, QuestionOutcome]:
        """Returns the outcomes of the final model by uid."""
        return {question.uid: question.outcomes[self.final] for question in self.questions}

    def newly_failed(self, model: str) -> list[str]:
        """Returns the uids of questions that passed in the last trusted result but that the model does not
        pass."""
        return [
            q.uid
            for q in self.questions
            if self.before.get(q.uid) == "passed" and q.outcomes[model] != "passed"
        ]

    def recovered(self, model: str) -> list[str]:
        """Returns the uids of questions that did not pass in the last trusted result but that the model
        passes."""
        return [
            q.uid
            for q in self.questions
            if self.before.get(q.uid, "passed") != "passed" and q.outcomes[model] == "passed"
        ]

    @property
    def rows(self) -> list[tuple[str, QuestionResult]]:
        """Returns each question with its change for the final model (newly failed, recovered or none),
        starting with the questions that the model does not pass."""
        changed = dict.fromkeys(self.newly_failed(self.final), "newly failed") | dict.fromkeys(
            self.recovered(self.final), "recovered"
        )
        ordered = sorted(self.questions, key=lambda question: question.outcomes[self.final] == "passed")
        return [(changed.get(question.uid, ""), question) for question in ordered]


def band_of(
    now: Mapping[str, QuestionOutcome], earlier: Sequence[Mapping[str, QuestionOutcome]], width: float
) -> Band | None:
    """Compares the fraction of passed questions with earlier results, over the questions that all results
    have in common. Returns None if there are no earlier results or no shared questions.

    Uses a control chart (Shewhart 1931): mean +- `width` standard deviations. The standard deviation is
    computed from the earlier shares. It is at least the standard deviation of a binomial share, sqrt(p (1 -
    p) / n), with two passed and two failed questions added to p (Agresti & Coull 1998), so that equal results
    do not give a band of width 0. It is multiplied by sqrt(1 + 1 / results), because the mean is also
    estimated.
    """
    shared = [uid for uid in now if all(uid in one for one in earlier)]
    if not earlier or not shared:
        return None
    share, *shares = (fmean(one[uid] == "passed" for uid in shared) for one in (now, *earlier))
    mean = fmean(shares)
    count = len(shared)
    cautious = (mean * count + 2) / (count + 4)
    spread = max(
        stdev(shares) if len(shares) > 1 else 0.0, math.sqrt(cautious * (1 - cautious) / count)
    ) * math.sqrt(1 + 1 / len(shares))
    deviation = (share - mean) / spread
    return Band(
        results=len(shares),
        questions=count,
        share=share,
        mean=mean,
        spread=spread,
        low=mean - width * spread,
        high=mean + width * spread,
        deviation=deviation,
        outside=abs(deviation) > width,
    )


def metrics(report: RegressionReport) -> dict[str, float]:
    """Returns `passed/MODEL`, `newly_failed/MODEL`, ... and, for the final model, `deviation` and
    `out_of_band`, which are 0 if there is no band."""
    found: dict[str, float] = {"history": float(report.band.results) if report.band else 0.0}
    for model in report.models:
        outcomes = [question.outcomes[model] for question in report.questions]
        found[f"passed/{model}"] = fmean(outcome == "passed" for outcome in outcomes)
        found[f"unjudged/{model}"] = float(outcomes.count("no verdict"))
        found[f"newly_failed/{model}"] = float(len(report.newly_failed(model)))
        found[f"recovered/{model}"] = float(len(report.recovered(model)))
    found["deviation"] = report.band.deviation if report.band else 0.0
    return found | {"out_of_band": float(report.band.outside) if report.band else 0.0}


def regression_table(report: RegressionReport) -> str:
    """Returns each question's outcome as a markdown table that starts with the questions that the final model
    does not pass."""
    rows = [
        (q.uid, *(q.outcomes[model] for model in report.models), change, q.reason, q.source)
        for change, q in report.rows
    ]
    return table(
        (
            "question",
            *report.models,
            f"{report.final} since the last trusted result",
            "reason",
            "source",
        ),
        rows,
    )
