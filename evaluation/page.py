"""The page a person shows to others: one HTML file with the verdict, the DAG, charts, example battles, lineage and configuration.

Self-contained: inline CSS, inline SVG, no script, nothing is fetched. All text goes through Jinja2's autoescape; only our own charts are
marked safe. A part that is missing (no evaluation, a failed stage, no metrics) is said in its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import jinja2
from markupsafe import Markup
from pydantic import ValidationError

from evaluation.battles import examples
from evaluation.curves import (
    Lost,
    Run,
    calibration_chart,
    over_optimisation_chart,
    rounds_chart,
    stage_chart,
    tax_chart,
    win_rate_chart,
)
from evaluation.dag import HEIGHT, WIDTH, draw
from evaluation.family import family_svg
from evaluation.over_optimisation import FILE as OVER_OPTIMISATION
from evaluation.over_optimisation import OverOptimisation
from evaluation.phases import Phase, phases_of, waits_of
from evaluation.reward_eval import REWARD_MODELS, RewardReports
from evaluation.summary import Evaluated, Evidence, StageView, as_json, read, read_evaluation, summary_of, trend
from evaluation.suspects import suspects
from evaluation.tax_report import TAX, TaxReport
from evaluation.words import controlled, duration, interval, number, percent
from rlhf_core.config import Evaluation, Publication
from rlhf_core.data.report import stored_warnings
from rlhf_core.gates import holding
from rlhf_core.lineage import TRAINS, data_of, lineage
from rlhf_core.stage import LOG, write_text
from rlhf_core.types import Answering, Judging, WinRate

LOG_LINES = 25


class Tile(NamedTuple):
    title: str
    value: str
    note: str


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


class PublishedRow(NamedTuple):
    """What a publication stage put where: on the Hub with commit and tag, or in a folder."""

    stage: str
    what: str
    where: str
    files: float
    megabytes: float


class Chart(NamedTuple):
    """The curves of one stage or loop, and its result's metrics (`notes`), which speak of `when`; of PPO, where the time went."""

    title: str
    seconds: float | None
    svg: Markup | None
    when: str
    notes: dict[str, float]
    phases: list[Phase]
    waits: dict[str, float]


def write_report(out_dir: Path, recipe_name: str, stages: Sequence[StageView]) -> Path:
    """Writes `summary.json` and `report.html` (each atomically) to `out_dir` and returns the page's path."""
    evidence = [read(view) for view in stages]
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "summary.json", as_json(summary_of(recipe_name, evidence)))
    write_text(out_dir / "report.html", render(recipe_name, evidence))
    return out_dir / "report.html"


def render(recipe_name: str, stages: Sequence[Evidence]) -> str:
    """The page as text."""
    evaluated = read_evaluation(stages)
    chains = _rounds(stages)
    agreement = [f"{judge} in {percent(share)}" for judge, share in evaluated.report.agreement.items()] if evaluated else []
    reward_models = _reward_models(evaluated)
    calibrations = {m.model: [(b.confidence, b.accuracy, b.pairs) for b in m.calibration] for m in reward_models.models}
    over = _over_optimisation(evaluated)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, duration=duration, number=number, interval=interval, controlled=controlled)
    page = environment.get_template("page.html.j2").render(
        recipe=recipe_name,
        stages=stages,
        evaluated=evaluated,
        verdict=verdict(evaluated, stages),
        tiles=_tiles(stages, evaluated),
        dag=draw({stage.view.name: stage.view.parents for stage in stages}),
        size=(WIDTH, HEIGHT),
        by_name={stage.view.name: stage for stage in stages},
        total_seconds=sum(stage.result.seconds for stage in stages if stage.result),
        troubles=[(stage, _log_tail(stage)) for stage in stages if stage.view.status == "failed"],
        gates=[verdict for stage in stages for verdict in stage.view.gates],
        suspects=suspects(stages),
        families=_families(stages),
        win_rates=_win_rates(evaluated) if evaluated else None,
        agreement="; ".join(agreement),
        rounds=_rounds_svg(chains, evaluated, stages),
        rows=_rows(evaluated) if evaluated else [],
        categories=sorted({category for rate in evaluated.decided.values() for category in rate.by_category}) if evaluated else [],
        judges=_judges(evaluated) if evaluated else [],
        judges_told=_judges_told(evaluated),
        reward_models=reward_models,
        answering=_answering(evaluated),
        taxes=_taxes(stages),
        calibration=Markup(calibration_chart(calibrations)) if calibrations else None,
        over_optimisation=over,
        over_optimisation_chart=Markup(over_optimisation_chart(over)) if over else None,
        groups=examples(evaluated) if evaluated else [],
        charts=_charts(stages, chains),
        data=_data(stages),
        data_warnings={stage.view.name: found for stage in stages if (found := _data_warnings(Path(stage.view.run_dir)))},
        origins={stage.view.name: _origins(stage, stages) for stage in stages},
        published=_published(stages),
        environments=_environments(stages),
        configs={stage.view.name: _config(stage) for stage in stages},
    )
    return page.encode("utf-8", "replace").decode()  # a model may emit half of a surrogate pair


def _data_warnings(run_dir: Path) -> list[str]:
    """What the data report warns of, with files of other stages named from the folder of all stages on."""
    return [sentence.replace(f"{run_dir.parent.resolve()}/", "") for sentence in stored_warnings(run_dir)]


def verdict(evaluated: Evaluated | None, stages: Sequence[Evidence]) -> str:
    """One sentence: is the final model better, and how sure is that."""
    if evaluated is None:
        stopped = [stage.view.name for stage in stages if stage.view.status == "failed"]
        if stopped:
            return f"The run stopped at {', '.join(stopped)}: there is no evaluation."
        held = [stage.view.name for stage in stages if holding(stage.view.gates)]
        if held:
            return f"The run stopped after {', '.join(held)}, which did not pass a gate: there is no evaluation."
        return "This run has no evaluation (yet)."
    rate = evaluated.decided[evaluated.final]
    edge = any(round(100 * bound) == 50 for bound in (rate.ci_low, rate.ci_high))
    digits = 1 if edge else 0  # an interval that ends near one half is told exactly
    won = percent(rate.win_rate, digits)
    evidence = f"(95 % interval {interval(rate, digits)}, {rate.num_questions} questions, judge: {rate.judge})"
    final, baseline = f"The final model ({rate.model})", _title(rate.baseline)
    if rate.ci_low > 0.5:
        return f"{final} beats {baseline} in {won} of battles {evidence}."
    if rate.ci_high < 0.5:
        return f"{final} is worse than {baseline}: it wins only {won} of battles {evidence}."
    return f"{final} is not clearly better or worse than {baseline}: it wins {won} of battles {evidence}."


def _tiles(stages: Sequence[Evidence], evaluated: Evaluated | None) -> list[Tile]:
    tiles = []
    if evaluated:
        rate, right = evaluated.decided[evaluated.final], evaluated.report.right
        tiles.append(Tile("Battles won", percent(rate.win_rate), f"{interval(rate)} against {_title(rate.baseline)}"))
        if {rate.baseline, rate.model} <= right.keys():
            value = f"{percent(right[rate.baseline])} → {percent(right[rate.model])}"
            tiles.append(Tile("Right answers", value, f"{_title(rate.baseline)} → {rate.model}"))
    for stage in stages:
        name = "" if stage.view.name == stage.view.kind else f" ({stage.view.name})"
        rise = trend(stage.curves.get("reward/mean", []))
        if stage.view.kind == "ppo" and rise:
            note = "first → last fifth of the run"
            tiles.append(Tile(f"PPO reward{name}", f"{number(rise.first)} → {number(rise.last)}", _errors(note, rise.errors)))
        accuracy = stage.result.metrics.get("eval/accuracy") if stage.result else None
        if stage.view.kind == "reward_model" and accuracy is not None:
            tiles.append(Tile(f"Reward model{name}", percent(accuracy), "held-out pairs ranked right"))
    return tiles


def _title(model: str) -> str:
    return "SFT" if model == "sft" else model


def _errors(note: str, errors: float | None) -> str:
    return note if errors is None else f"{note}, {errors:+.1f} standard errors"


def _rounds(stages: Sequence[Evidence]) -> list[list[Evidence]]:
    """Chains of stages that train on what a preferences stage sampled, each round on the one before."""
    kinds = {stage.view.name: stage.view.kind for stage in stages}
    chains: list[list[Evidence]] = []
    for stage in stages:
        if stage.view.kind not in ("dpo", "kto", "sft") or "preferences" not in (kinds.get(parent) for parent in stage.view.parents):
            continue
        before = next((chain for chain in chains if chain[-1].view.name in stage.view.parents), None)
        if before is None:
            chains.append([stage])
        else:
            before.append(stage)
    return chains


def _rounds_svg(chains: Sequence[Sequence[Evidence]], evaluated: Evaluated | None, stages: Sequence[Evidence]) -> Markup | None:
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


def _rows(evaluated: Evaluated) -> list[Row]:
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


def _win_rates(evaluated: Evaluated) -> Markup:
    return Markup(win_rate_chart(list(evaluated.decided.values()), evaluated.final, evaluated.against_parent))


def _judges(evaluated: Evaluated) -> list[JudgeRow]:
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


JUDGES_TOLD = {
    "rule": "A rule compares every answer with the known one: right beats wrong.",
    "reward": "A reward model prefers the answer that it scores higher.",
    "openai": "A chat model is asked as Arena-Hard asks, twice for each question.",
}


def _judges_told(evaluated: Evaluated | None) -> str:
    """What the kinds of judges of this evaluation do, in a sentence each."""
    config = evaluated.stage.request.config if evaluated and evaluated.stage.request else None
    kinds = dict.fromkeys(judge.kind for judge in config.judges) if isinstance(config, Evaluation) else ()
    return " ".join(JUDGES_TOLD[kind] for kind in kinds if kind in JUDGES_TOLD)


def _published(stages: Sequence[Evidence]) -> list[PublishedRow]:
    rows = []
    for stage in stages:
        if stage.view.kind != "publication" or stage.result is None or stage.request is None:
            continue
        config, metrics = stage.request.config, stage.result.metrics
        assert isinstance(config, Publication)
        try:
            receipt = json.loads((stage.view.run_dir / stage.result.outputs["hub"]).read_text())
            where = f"{receipt['repo_id']}, branch {config.branch}, tag {receipt['tag']}, commit {receipt['commit'][:12]}"
        except (OSError, ValueError, KeyError):
            where = f"not sent to the Hub; in stages/{stage.view.run_dir.name}"
        what = config.model or config.dataset or ""
        rows.append(PublishedRow(stage.view.name, what, where, metrics.get("files", math.nan), metrics.get("bytes", math.nan) / 1e6))
    return rows


def _reward_models(evaluated: Evaluated | None) -> RewardReports:
    """Empty when none were evaluated."""
    try:
        return RewardReports.model_validate_json((evaluated.folder / REWARD_MODELS).read_text()) if evaluated else RewardReports.empty()
    except (OSError, ValidationError):
        return RewardReports.empty()


def _answering(evaluated: Evaluated | None) -> dict[str, tuple[Answering, str]]:
    """The remote models with their settings in words; a password inside a URL is left out."""
    found = evaluated.report.answering if evaluated else {}
    return {
        name: (use.model_copy(update={"url": _public(use.url)}), ", ".join(f"{key}={value}" for key, value in use.settings.items()))
        for name, use in found.items()
    }


def _families(stages: Sequence[Evidence]) -> list[tuple[str, Markup]]:
    """The lineage of every trained model that no other stage was trained from, drawn."""
    models = [stage for stage in stages if stage.result and "checkpoint" in stage.result.outputs and stage.view.kind in TRAINS]
    used = {parent for stage in models for parent in stage.view.parents}
    found = []
    for stage in (stage for stage in models if stage.view.name not in used):
        run_dir = stage.view.run_dir
        ancestor = lineage(run_dir)
        found.append((stage.view.name, Markup(family_svg(ancestor, data_of(ancestor, run_dir.parents[1])))))
    return found


def _taxes(stages: Sequence[Evidence]) -> list[Tax]:
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


def _over_optimisation(evaluated: Evaluated | None) -> OverOptimisation | None:
    try:
        return OverOptimisation.model_validate_json((evaluated.folder / OVER_OPTIMISATION).read_text()) if evaluated else None
    except (OSError, ValidationError):
        return None


def _charts(stages: Sequence[Evidence], chains: Sequence[Sequence[Evidence]]) -> list[Chart]:
    """One chart per training stage; the rounds of a loop share one."""
    later = {stage.view.name for chain in chains for stage in chain[1:]}
    charts = []
    for stage in stages:
        view = stage.view
        if view.kind in ("evaluation", "alignment_tax", "publication") or view.name in later:
            continue
        chain = next((chain for chain in chains if chain[0] is stage), [stage])
        loop = len(chain) > 1
        runs = [Run(f"round {nth}" if loop else "", member.curves) for nth, member in enumerate(chain, 1)]
        title = f"{view.name} … {chain[-1].view.name}" if loop else view.name
        svg = stage_chart(title, view.kind, runs)
        results = [member.result for member in chain if member.result]
        seconds = sum(result.seconds for result in results) if results else None
        final = {name: value for name, value in results[-1].metrics.items() if not name.startswith("data/")} if results else {}
        when = "end of the last round" if loop else "end"
        charts.append(Chart(title, seconds, Markup(svg) if svg else None, when, final, phases_of(final), waits_of(final)))
    return charts


def _data(stages: Sequence[Evidence]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Columns, and per stage its `data/...` metrics without the prefix."""
    rows = {}
    for stage in stages:
        metrics = stage.result.metrics if stage.result else {}
        row = {name.removeprefix("data/"): value for name, value in metrics.items() if name.startswith("data/")}
        if row:
            rows[stage.view.name] = row
    return list(dict.fromkeys(column for row in rows.values() for column in row)), rows


def _origins(stage: Evidence, stages: Sequence[Evidence]) -> list[str]:
    """The parents, and the models from outside the recipe that the stage starts from."""
    inputs = stage.request.inputs if stage.request else {}
    outside = [name for name in inputs if not {name, stage.stage_of(name, stages)} & {s.view.name for s in stages}]
    return [*("…/" + Path(name).name if Path(name).is_absolute() else name for name in outside), *stage.view.parents]


def _environments(stages: Sequence[Evidence]) -> list[tuple[str, list[str]]]:
    """Each set of versions and the stages that were made with it."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.result:
            versions = ", ".join(f"{name} {version}" for name, version in stage.result.environment.items())
            found.setdefault(versions, []).append(stage.view.name)
    return list(found.items())


def _config(stage: Evidence) -> str | None:
    """The stage's configuration as JSON; a password inside a URL is left out."""
    if stage.request is None:
        return None
    config = {"seed": stage.request.seed, **stage.request.config.model_dump(mode="json")}
    return _public(json.dumps(config, indent=2, ensure_ascii=False))


def _public(text: str) -> str:
    """Text without the passwords inside its URLs."""
    return re.sub(r"://[^/@\s\"]+@", "://***@", text)


def _log_tail(stage: Evidence) -> str:
    """The end of a failed stage's log, without colours."""
    file = stage.view.run_dir / LOG
    if not file.is_file():
        return ""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines[-LOG_LINES:])
