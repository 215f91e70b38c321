"""Writes the report of a run, `report.html`, an HTML page with the verdict, the DAG, charts, example battles,
lineage and configuration.

The page is self-contained: it has inline CSS and SVG, no script and no external resources. Jinja2 escapes all
text; only our own charts are marked safe. A sentence replaces each missing part (no evaluation, a failed
stage, no metrics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from markupsafe import Markup

from evaluation.report import model_tables as page_models
from evaluation.report import stage_sections as page_stages
from evaluation.report.alarms import alarms
from evaluation.report.calibrations import calibrations, judge_belief
from evaluation.report.drawing.dag import HEIGHT, WIDTH, draw
from evaluation.report.drawing.evaluation_charts import (
    calibration_chart,
    over_optimisation_chart,
    win_rate_chart,
)
from evaluation.report.example_battles import examples
from evaluation.report.model_tables import rounds, rounds_svg
from evaluation.report.rollouts.rollout_page import FOLDER, TITLES, RolloutPage, write_rollout_page
from evaluation.report.summary import Evidence, StageView, as_json, read, read_evaluation, summary_of
from evaluation.report.template import fill
from evaluation.report.verdict import suspects, tiles, verdict
from evaluation.scores.over_optimisation import FILE as OVER_OPTIMISATION
from evaluation.scores.over_optimisation import OverOptimisation
from evaluation.scores.reward_accuracy import REWARD_MODELS, RewardReports
from rlhf_core.runs.run_dir import LOG
from rlhf_core.system.files import tail, write_text


def write_report(out_dir: Path, recipe_name: str, stages: Sequence[StageView], run: str = "") -> Path:
    """Writes `summary.json`, `report.html` and the pages of recorded answers (each atomically) to `out_dir`.
    Returns the page's path. `run`: `RunRecord.heading`."""
    evidence = [read(view) for view in stages]
    out_dir.mkdir(parents=True, exist_ok=True)
    pages = rollout_pages(out_dir, stages)
    write_text(out_dir / "summary.json", as_json(summary_of(recipe_name, evidence)))
    write_text(out_dir / "report.html", render(recipe_name, evidence, run, pages))
    return out_dir / "report.html"


def rollout_pages(out_dir: Path, stages: Sequence[StageView]) -> dict[str, list[RolloutPage]]:
    """Writes the pages of recorded answers. Returns them by stage."""
    found: dict[str, list[RolloutPage]] = {}
    for view in stages:
        pages = [write_rollout_page(out_dir, view.name, view.run_dir, folder) for folder in TITLES]
        found[view.name] = [page for page in pages if page is not None]
    return found


def in_subfolder(page: str) -> str:
    """Returns the HTML of a page that is moved to a subfolder: its links point one folder up."""
    return page.replace(f'href="{FOLDER}/', f'href="../{FOLDER}/')


def render(
    recipe_name: str,
    stages: Sequence[Evidence],
    run: str = "",
    pages: Mapping[str, Sequence[RolloutPage]] = MappingProxyType({}),
) -> str:
    """Returns the page's HTML. `run`: as in `write_report`; `pages`: the pages of recorded answers, by
    stage."""
    evaluated = read_evaluation(stages)
    chains = rounds(stages)
    reward_models = RewardReports.read(evaluated.folder / REWARD_MODELS) if evaluated else None
    has_curve = reward_models is not None and any(
        len(model.calibration) > 1 for model in reward_models.models
    )
    over = OverOptimisation.read(evaluated.folder / OVER_OPTIMISATION) if evaluated else None
    return fill(
        "page.html.j2",
        recipe=recipe_name,
        run=run,
        stages=stages,
        evaluated=evaluated,
        verdict=verdict(evaluated, stages),
        judge_belief=judge_belief(evaluated, stages),
        calibrations=calibrations(stages),
        suites=page_models.suites(stages),
        alarms=alarms(stages, evaluated),
        tiles=tiles(stages, evaluated),
        dag=draw({stage.view.name: stage.view.parents for stage in stages}),
        size=(WIDTH, HEIGHT),
        by_name={stage.view.name: stage for stage in stages},
        total_seconds=sum(stage.result.seconds for stage in stages if stage.result),
        troubles=[
            (stage, tail(stage.view.run_dir / LOG, 25)) for stage in stages if stage.view.status == "failed"
        ],
        gates=[verdict for stage in stages for verdict in stage.view.gates],
        suspects=suspects(stages),
        families=page_stages.families(stages),
        win_rates=(
            Markup(
                win_rate_chart(list(evaluated.decided.values()), evaluated.final, evaluated.against_parent)
            )
            if evaluated
            else None
        ),
        rounds=rounds_svg(chains, evaluated, stages),
        categories=(
            sorted({category for rate in evaluated.decided.values() for category in rate.by_category})
            if evaluated
            else []
        ),
        style=(
            [effect for effect in evaluated.report.style if effect.ci_low != effect.ci_high]
            if evaluated
            else []
        ),
        judge_descriptions=page_models.judge_descriptions(evaluated),
        reward_models=reward_models,
        taxes=page_models.taxes(stages),
        drifts=page_models.drifts(stages),
        calibration=Markup(calibration_chart(reward_models)) if reward_models and has_curve else None,
        over_optimisation=over,
        over_optimisation_chart=Markup(over_optimisation_chart(over)) if over else None,
        groups=examples(evaluated) if evaluated else [],
        charts=page_stages.charts(stages, chains, pages),
        data=page_stages.data(stages),
        data_warnings={
            stage.view.name: found for stage in stages if (found := page_stages.data_warnings(stage))
        },
        origins={stage.view.name: page_stages.origins(stage, stages) for stage in stages},
        published=page_stages.published(stages),
        environments=page_stages.environments(stages),
        configs={stage.view.name: page_stages.config_text(stage) for stage in stages},
    )
