"""Collects the report's part about regression suites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.regression.records import REGRESSION, QuestionResult, RegressionReport
from evaluation.report.summary import Evidence

SHOWN = 200  # questions on the page; the stage's regression.md has all


class Suite(NamedTuple):
    """A finished regression stage. `rows`: what changed and the question, first those that the final model does not pass."""

    name: str
    report: RegressionReport
    passed: dict[str, float]
    rows: list[tuple[str, QuestionResult]]


def suites(stages: Sequence[Evidence]) -> list[Suite]:
    """Returns every finished regression stage."""
    found = []
    for stage in stages:
        report = RegressionReport.read(stage.report / REGRESSION) if stage.report else None
        if stage.result is None or report is None:
            continue
        changed = dict.fromkeys(report.newly_failed(report.final), "newly failed") | dict.fromkeys(
            report.recovered(report.final), "recovered"
        )
        ordered = sorted(report.questions, key=lambda question: question.outcomes[report.final] == "passed")
        passed = {model: stage.result.metrics.get(f"passed/{model}", float("nan")) for model in report.models}
        found.append(Suite(stage.view.name, report, passed, [(changed.get(one.uid, ""), one) for one in ordered[:SHOWN]]))
    return found
