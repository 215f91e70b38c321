"""The page a person shows to others: one HTML file with the verdict, the DAG, charts, example battles, lineage and configuration.

Self-contained: inline CSS, inline SVG, no script, nothing is fetched. All text goes through Jinja2's autoescape; only our own charts are
marked safe. A part that is missing (no evaluation, a failed stage, no metrics) is said in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from evaluation import page_models, page_stages
from evaluation.battles import examples
from evaluation.dag import HEIGHT, WIDTH, draw
from evaluation.model_charts import calibration_chart, over_optimisation_chart
from evaluation.page_rounds import rounds, rounds_svg
from evaluation.page_verdict import tiles, verdict
from evaluation.summary import Evidence, StageView, as_json, read, read_evaluation, summary_of
from evaluation.suspects import suspects
from evaluation.template import fill
from evaluation.words import percent
from rlhf_core.stage import write_text


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
    chains = rounds(stages)
    agreement = [f"{judge} in {percent(share)}" for judge, share in evaluated.report.agreement.items()] if evaluated else []
    reward_models = page_models.reward_models(evaluated)
    calibrations = {m.model: [(b.confidence, b.accuracy, b.pairs) for b in m.calibration] for m in reward_models.models}
    over = page_models.over_optimisation(evaluated)
    return fill(
        "page.html.j2",
        recipe=recipe_name,
        stages=stages,
        evaluated=evaluated,
        verdict=verdict(evaluated, stages),
        tiles=tiles(stages, evaluated),
        dag=draw({stage.view.name: stage.view.parents for stage in stages}),
        size=(WIDTH, HEIGHT),
        by_name={stage.view.name: stage for stage in stages},
        total_seconds=sum(stage.result.seconds for stage in stages if stage.result),
        troubles=[(stage, page_stages.log_tail(stage)) for stage in stages if stage.view.status == "failed"],
        gates=[verdict for stage in stages for verdict in stage.view.gates],
        suspects=suspects(stages),
        families=page_stages.families(stages),
        win_rates=page_models.win_rates(evaluated) if evaluated else None,
        agreement="; ".join(agreement),
        rounds=rounds_svg(chains, evaluated, stages),
        rows=page_models.rows(evaluated) if evaluated else [],
        categories=sorted({category for rate in evaluated.decided.values() for category in rate.by_category}) if evaluated else [],
        judges=page_models.judges(evaluated) if evaluated else [],
        judges_told=page_models.judges_told(evaluated),
        reward_models=reward_models,
        answering=page_models.answering(evaluated),
        taxes=page_models.taxes(stages),
        calibration=Markup(calibration_chart(calibrations)) if calibrations else None,
        over_optimisation=over,
        over_optimisation_chart=Markup(over_optimisation_chart(over)) if over else None,
        groups=examples(evaluated) if evaluated else [],
        charts=page_stages.charts(stages, chains),
        data=page_stages.data(stages),
        data_warnings={stage.view.name: found for stage in stages if (found := page_stages.data_warnings(stage))},
        origins={stage.view.name: page_stages.origins(stage, stages) for stage in stages},
        published=page_stages.published(stages),
        environments=page_stages.environments(stages),
        configs={stage.view.name: page_stages.config_text(stage) for stage in stages},
    )
