"""Collects the report's tables and charts about models: judges, alignment tax, regression suites, drift, and
win rates over the rounds of loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from evaluation.alignment_tax.tax_report import TAX, TaxReport
from evaluation.drift.drift_report import DRIFT, DriftReport, Earlier
from evaluation.regression.regression_report import REGRESSION, QuestionResult, RegressionReport
from evaluation.report.drawing.drift_chart import drift_chart
from evaluation.report.drawing.evaluation_charts import rounds_chart, tax_chart
from evaluation.report.summary import Evaluated, Evidence
from rlhf_core.config import KINDS

JUDGE_DESCRIPTIONS = {
    "rule": "A rule compares every answer with the known answer: right beats wrong.",
    "reward": "A reward model prefers the answer that it scores higher.",
    "openai": "A chat model compares the answers, using Arena-Hard's prompt, twice for each question.",
}
SHOWN_QUESTIONS = 200  # on the page; the stage's regression.md has all questions


class Tax(NamedTuple):
    """An alignment_tax stage: its report, and the chart of the tasks' main metrics."""

    name: str
    report: TaxReport
    svg: Markup | None


class Suite(NamedTuple):
    """A finished regression stage. `rows`: each question with its change, starting with the questions that
    the final model does not pass."""

    name: str
    report: RegressionReport
    passed: dict[str, float]
    rows: list[tuple[str, QuestionResult]]


def judge_descriptions(evaluated: Evaluated | None) -> str:
    """Returns a sentence for each kind of judge in the evaluation."""
    request = evaluated.stage.request if evaluated else None
    kinds = dict.fromkeys(judge.kind for judge in request.config.judges_of_answers) if request else ()
    return " ".join(JUDGE_DESCRIPTIONS[kind] for kind in kinds if kind in JUDGE_DESCRIPTIONS)


def taxes(stages: Sequence[Evidence]) -> list[Tax]:
    """Returns the report and chart of every finished alignment_tax stage."""
    found = []
    for stage in stages:
        if stage.report and (report := TaxReport.read(stage.report / TAX)):
            found.append(Tax(stage.view.name, report, Markup(tax_chart(report)) if report.main else None))
    return found


def suites(stages: Sequence[Evidence]) -> list[Suite]:
    """Returns every finished regression stage."""
    found = []
    for stage in stages:
        report = RegressionReport.read(stage.report / REGRESSION) if stage.report else None
        if stage.result is None or report is None:
            continue
        passed = {model: stage.result.metrics.get(f"passed/{model}", float("nan")) for model in report.models}
        found.append(Suite(stage.view.name, report, passed, report.rows[:SHOWN_QUESTIONS]))
    return found


class Drifted(NamedTuple):
    """A drift stage: its report, its own result followed by the results in its history, newest first, and the
    curves of its signals (None without a history)."""

    name: str
    report: DriftReport
    results: list[Earlier]
    svg: Markup | None


def drifts(stages: Sequence[Evidence]) -> list[Drifted]:
    """Returns the report and curves of every finished drift stage."""
    found = []
    for stage in stages:
        if stage.report and (report := DriftReport.read(stage.report / DRIFT)):
            here = Earlier(at=report.at, digest=stage.digest, model=report.model, values=report.values)
            results = [*report.history, here]
            svg = Markup(drift_chart(report, results)) if report.history else None
            found.append(Drifted(stage.view.name, report, results[::-1], svg))
    return found


def rounds(stages: Sequence[Evidence]) -> list[list[Evidence]]:
    """Returns the chains of training stages in loops. Each stage in a chain trains on the output of a
    preferences stage and starts from the previous stage's model."""
    pairs = {stage.view.name for stage in stages if KINDS[stage.view.kind].makes == "pairs"}
    chains: list[list[Evidence]] = []
    for stage in stages:
        if not KINDS[stage.view.kind].takes or not pairs.intersection(stage.view.parents):
            continue
        before = next((chain for chain in chains if chain[-1].view.name in stage.view.parents), None)
        if before is None:
            chains.append([stage])
        else:
            before.append(stage)
    return chains


def rounds_svg(
    chains: Sequence[Sequence[Evidence]], evaluated: Evaluated | None, stages: Sequence[Evidence]
) -> Markup | None:
    """Draws the win rates over the rounds. Returns None when no chain has two evaluated models."""
    if evaluated is None:
        return None
    # keyed by stage, not by alias
    rates = {evaluated.stage.stage_of(model, stages): rate for model, rate in evaluated.decided.items()}
    baseline = evaluated.stage.stage_of(evaluated.report.baseline, stages)
    lines = []
    for chain in chains:
        points = []
        for stage in [
            *(
                s
                for s in stages
                if s.view.name in chain[0].view.parents and KINDS[s.view.kind].makes != "pairs"
            ),
            *chain,
        ]:
            rate = rates.get(stage.view.name)
            if rate:
                points.append((rate.model, rate.win_rate, rate.ci_low, rate.ci_high))
            elif stage.view.name == baseline:
                points.append((evaluated.report.baseline, 0.5, 0.5, 0.5))
        if len(points) > 1:
            lines.append(points)
    kinds = sorted({chain[0].view.kind.upper() for chain in chains})
    return Markup(rounds_chart(lines, " and ".join(kinds))) if lines else None
