"""Collects the page's tables and charts of models: win rates, judges, remote models, reward models, alignment tax, rounds of loops."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup
from pydantic import ValidationError

from evaluation.alignment_tax.report import TAX, TaxReport
from evaluation.report.charts import Lost, rounds_chart, tax_chart, win_rate_chart
from evaluation.report.summary import Evaluated, Evidence
from evaluation.scores.over_optimisation import FILE as OVER_OPTIMISATION
from evaluation.scores.over_optimisation import OverOptimisation
from evaluation.scores.reward_accuracy import REWARD_MODELS, RewardReports
from rlhf_core.config import KINDS, Evaluation
from rlhf_core.records import Answering, Judging, WinRate
from rlhf_core.system.redaction import without_passwords

JUDGE_DESCRIPTIONS = {
    "rule": "A rule compares every answer with the known one: right beats wrong.",
    "reward": "A reward model prefers the answer that it scores higher.",
    "openai": "A chat model compares the answers with Arena-Hard's prompt, twice for each question.",
}


class Row(NamedTuple):
    """A model in the evaluation table; `rate` is None for the baseline."""

    model: str
    rate: WinRate | None
    parent: WinRate | None
    opinions: list[WinRate]
    right: float | None
    mean_tokens: float | None
    truncated: float | None


class JudgeRow(NamedTuple):
    """A judge: its counts, its swap consistency, and its agreement with the first judge (None for that judge itself)."""

    name: str
    use: Judging | None
    swap_consistency: float
    agreement: float | None


class Tax(NamedTuple):
    """An alignment_tax stage: its report, and the chart of the tasks' main metrics."""

    name: str
    report: TaxReport
    svg: Markup | None


def rows(evaluated: Evaluated) -> list[Row]:
    """Returns a row for each judged model, with the baseline first unless it was judged itself."""
    report = evaluated.report

    def row(model: str, rate: WinRate | None) -> Row:
        opinions = [other for other in evaluated.opinions if other.model == model]
        return Row(
            model,
            rate,
            evaluated.against_parent.get(model),
            opinions,
            report.right.get(model),
            report.mean_tokens.get(model),
            report.truncated.get(model),
        )

    models = [row(model, rate) for model, rate in evaluated.decided.items()]
    return models if report.baseline in evaluated.decided else [row(report.baseline, None), *models]


def win_rates(evaluated: Evaluated) -> Markup:
    """Draws the win rates by the first judge."""
    return Markup(win_rate_chart(list(evaluated.decided.values()), evaluated.final, evaluated.against_parent))


def judges(evaluated: Evaluated) -> list[JudgeRow]:
    """Returns a row for each judge, the one that decides first."""
    return [
        JudgeRow(
            report.judge,
            report.judging,
            fmean(rate.swap_consistency for rate in report.win_rates) if report.win_rates else 0.0,
            evaluated.report.agreement.get(report.judge),
        )
        for report in (evaluated.report, *evaluated.others)
    ]


def judge_descriptions(evaluated: Evaluated | None) -> str:
    """Returns a sentence for each kind of judge of the evaluation."""
    config = evaluated.stage.request.config if evaluated and evaluated.stage.request else None
    kinds = dict.fromkeys(judge.kind for judge in config.judges) if isinstance(config, Evaluation) else ()
    return " ".join(JUDGE_DESCRIPTIONS[kind] for kind in kinds if kind in JUDGE_DESCRIPTIONS)


def answering(evaluated: Evaluated | None) -> dict[str, tuple[Answering, str]]:
    """Returns the remote models with their settings as text; passwords in URLs are left out."""
    found = {}
    for name, use in (evaluated.report.answering if evaluated else {}).items():
        settings = ", ".join(f"{key}={value}" for key, value in use.settings.items())
        found[name] = (use.model_copy(update={"url": without_passwords(use.url)}), settings)
    return found


def reward_models(evaluated: Evaluated | None) -> RewardReports:
    """Reads the reports of reward models; empty when none were evaluated."""
    try:
        return RewardReports.model_validate_json((evaluated.folder / REWARD_MODELS).read_text()) if evaluated else RewardReports.empty()
    except (OSError, ValidationError):
        return RewardReports.empty()


def over_optimisation(evaluated: Evaluated | None) -> OverOptimisation | None:
    """Reads the over-optimisation curve; None when it was not measured."""
    try:
        return OverOptimisation.model_validate_json((evaluated.folder / OVER_OPTIMISATION).read_text()) if evaluated else None
    except (OSError, ValidationError):
        return None


def taxes(stages: Sequence[Evidence]) -> list[Tax]:
    """Returns the report and chart of every finished alignment_tax stage."""
    found = []
    for stage in stages:
        if stage.view.kind != "alignment_tax" or stage.result is None:
            continue
        try:
            report = TaxReport.model_validate_json((stage.view.run_dir / stage.result.outputs.get("report", "report") / TAX).read_text())
        except (OSError, ValidationError):
            continue
        shares = all(0 <= value <= 1 for row in report.main for value in (row.value, row.baseline_value))
        scale, unit = (100, "percentage points") if shares else (1, "in the metric's own unit")
        bounds = [tuple(None if v is None else scale * v for v in (row.ci_low, row.ci_high)) for row in report.main]
        losses = [Lost(row.task, row.model, scale * row.tax, *bound) for row, bound in zip(report.main, bounds, strict=True)]
        found.append(Tax(stage.view.name, report, Markup(tax_chart(losses, report.baseline, unit)) if losses else None))
    return found


def rounds(stages: Sequence[Evidence]) -> list[list[Evidence]]:
    """Returns the chains of training stages of loops: each stage trains on a preferences stage and starts from the stage before it."""
    kinds = {stage.view.name: stage.view.kind for stage in stages}
    chains: list[list[Evidence]] = []
    for stage in stages:
        if not KINDS[stage.view.kind].takes or "preferences" not in (kinds.get(parent) for parent in stage.view.parents):
            continue
        before = next((chain for chain in chains if chain[-1].view.name in stage.view.parents), None)
        if before is None:
            chains.append([stage])
        else:
            before.append(stage)
    return chains


def rounds_svg(chains: Sequence[Sequence[Evidence]], evaluated: Evaluated | None, stages: Sequence[Evidence]) -> Markup | None:
    """Draws the win rates over the rounds; None when fewer than two of a chain were evaluated."""
    if evaluated is None:
        return None
    rates = {evaluated.stage.stage_of(model, stages): rate for model, rate in evaluated.decided.items()}  # by stage, not by alias
    baseline = evaluated.stage.stage_of(evaluated.report.baseline, stages)
    lines = []
    for chain in chains:
        points = []
        for stage in [*(s for s in stages if s.view.name in chain[0].view.parents and s.view.kind != "preferences"), *chain]:
            rate = rates.get(stage.view.name)
            if rate:
                points.append((rate.model, rate.win_rate, rate.ci_low, rate.ci_high))
            elif stage.view.name == baseline:
                points.append((evaluated.report.baseline, 0.5, 0.5, 0.5))
        if len(points) > 1:
            lines.append(points)
    kinds = sorted({chain[0].view.kind.upper() for chain in chains})
    return Markup(rounds_chart(lines, " and ".join(kinds))) if lines else None
