"""What the page says of the models: win rates and tables of the evaluation, its judges, reward models, what alignment cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup
from pydantic import ValidationError

from evaluation.model_charts import Lost, tax_chart, win_rate_chart
from evaluation.over_optimisation import FILE as OVER_OPTIMISATION
from evaluation.over_optimisation import OverOptimisation
from evaluation.reward_eval import REWARD_MODELS, RewardReports
from evaluation.summary import Evaluated, Evidence
from evaluation.tax_report import TAX, TaxReport
from rlhf_core.config import Evaluation
from rlhf_core.passwords import without_passwords
from rlhf_core.types import Answering, Judging, WinRate

JUDGES_TOLD = {
    "rule": "A rule compares every answer with the known one: right beats wrong.",
    "reward": "A reward model prefers the answer that it scores higher.",
    "openai": "A chat model is asked as Arena-Hard asks, twice for each question.",
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
    """A judge: what it was asked, how steady it is, how often it names the deciding judge's winner (None for that judge itself)."""

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
    """The judged models; the baseline is the first row, unless it was judged itself."""
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
    """The chart of the win rates by the judge that decides."""
    return Markup(win_rate_chart(list(evaluated.decided.values()), evaluated.final, evaluated.against_parent))


def judges(evaluated: Evaluated) -> list[JudgeRow]:
    """The judge that decides first."""
    return [
        JudgeRow(
            report.judge,
            report.judging,
            fmean(rate.swap_consistency for rate in report.win_rates) if report.win_rates else 0.0,
            evaluated.report.agreement.get(report.judge),
        )
        for report in (evaluated.report, *evaluated.others)
    ]


def judges_told(evaluated: Evaluated | None) -> str:
    """What the kinds of judges of this evaluation do, in a sentence each."""
    config = evaluated.stage.request.config if evaluated and evaluated.stage.request else None
    kinds = dict.fromkeys(judge.kind for judge in config.judges) if isinstance(config, Evaluation) else ()
    return " ".join(JUDGES_TOLD[kind] for kind in kinds if kind in JUDGES_TOLD)


def answering(evaluated: Evaluated | None) -> dict[str, tuple[Answering, str]]:
    """The remote models with their settings in words; a password inside a URL is left out."""
    found = {}
    for name, use in (evaluated.report.answering if evaluated else {}).items():
        settings = ", ".join(f"{key}={value}" for key, value in use.settings.items())
        found[name] = (use.model_copy(update={"url": without_passwords(use.url)}), settings)
    return found


def reward_models(evaluated: Evaluated | None) -> RewardReports:
    """Empty when none were evaluated."""
    try:
        return RewardReports.model_validate_json((evaluated.folder / REWARD_MODELS).read_text()) if evaluated else RewardReports.empty()
    except (OSError, ValidationError):
        return RewardReports.empty()


def over_optimisation(evaluated: Evaluated | None) -> OverOptimisation | None:
    """None when it was not measured."""
    try:
        return OverOptimisation.model_validate_json((evaluated.folder / OVER_OPTIMISATION).read_text()) if evaluated else None
    except (OSError, ValidationError):
        return None


def taxes(stages: Sequence[Evidence]) -> list[Tax]:
    """Every finished alignment_tax stage."""
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
