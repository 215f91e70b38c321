"""Collects the report's sections about stages: charts, data, origins, lineage, versions, configuration,
publications and the time per phase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from evaluation.report.drawing.charts import StageCurves, single_values, stage_chart
from evaluation.report.drawing.dag import family_svg
from evaluation.report.drawing.timeline_chart import timeline_chart
from evaluation.report.iterations import WAIT, ShownRollout, TimedPhase, phases_of, rollouts
from evaluation.report.rollouts.rollout_page import RolloutPage
from evaluation.report.summary import Evidence
from rlhf_core.config import KINDS, Publication
from rlhf_core.data.data_report import stored_warnings
from rlhf_core.runs.lineage import data_of, lineage
from rlhf_core.runs.timeline import read_timeline
from rlhf_core.system.redaction import without_passwords


class Chart(NamedTuple):
    """The chart of one stage or loop: its curves, the metrics that have a single value instead of a curve,
    `values`, and the metrics of its result, `notes`, at `when`. For PPO, the chart also has the phases, the
    fraction of an iteration during which each role waits for others, the timeline of the last logged
    iteration, and the pages of recorded answers."""

    title: str
    seconds: float | None
    svg: Markup | None
    values: dict[str, float]
    when: str
    notes: dict[str, float]
    phases: list[TimedPhase]
    waits: dict[str, float]
    timeline: tuple[int, Markup] | None
    rollouts: list[tuple[int, list[ShownRollout]]]
    pages: list[RolloutPage]


def charts(
    stages: Sequence[Evidence],
    chains: Sequence[Sequence[Evidence]],
    pages: Mapping[str, Sequence[RolloutPage]],
) -> list[Chart]:
    """Returns one chart per training stage; the rounds of a loop share a chart. `pages`: the pages of
    recorded answers, by stage."""
    later = {stage.view.name for chain in chains for stage in chain[1:]}
    found = []
    for stage in stages:
        view = stage.view
        if KINDS[view.kind].charts is None or view.name in later:
            continue
        chain = next((chain for chain in chains if chain[0] is stage), [stage])
        loop = len(chain) > 1
        runs = [
            StageCurves(f"round {nth}" if loop else "", member.curves) for nth, member in enumerate(chain, 1)
        ]
        title = f"{view.name} … {chain[-1].view.name}" if loop else view.name
        svg = stage_chart(title, view.kind, runs)
        values = single_values(view.kind, runs)
        results = [member.result for member in chain if member.result]
        seconds = sum(result.seconds for result in results) if results else None
        final = (
            {name: value for name, value in results[-1].metrics.items() if not name.startswith("data/")}
            if results
            else {}
        )
        when = "end of the last round" if loop else "end"
        waits = {name.removeprefix(WAIT): value for name, value in final.items() if name.startswith(WAIT)}
        shown = rollouts(chain[-1].view.run_dir)
        drawing = Markup(svg) if svg else None
        timeline = last_timeline(title, chain[-1].view.run_dir)
        phases = phases_of(final)
        own = [page for member in chain for page in pages.get(member.view.name, ())]
        found.append(Chart(title, seconds, drawing, values, when, final, phases, waits, timeline, shown, own))
    return found


def last_timeline(title: str, run_dir: Path) -> tuple[int, Markup] | None:
    """Returns the number of PPO's last logged iteration and the drawing of its timeline; None for other
    stages."""
    stored = read_timeline(run_dir)
    if stored is None or not stored.timeline.seconds > 0:
        return None
    return stored.iteration, Markup(timeline_chart(title, stored.timeline))


def data(stages: Sequence[Evidence]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Returns the columns of the data table, and each stage's `data/...` metrics without the prefix."""
    rows = {}
    for stage in stages:
        metrics = stage.result.metrics if stage.result else {}
        row = {
            name.removeprefix("data/"): value for name, value in metrics.items() if name.startswith("data/")
        }
        if row:
            rows[stage.view.name] = row
    return list(dict.fromkeys(column for row in rows.values() for column in row)), rows


def data_warnings(stage: Evidence) -> list[str]:
    """Returns the warnings of the stage's data report. Paths in other run directories are relative to
    `stages/`."""
    run_dir = stage.view.run_dir
    return [sentence.replace(f"{run_dir.parent.resolve()}/", "") for sentence in stored_warnings(run_dir)]


def origins(stage: Evidence, stages: Sequence[Evidence]) -> list[str]:
    """Returns a stage's parents, and the models from outside the recipe from which it starts."""
    inputs = stage.request.inputs if stage.request else {}
    outside = [
        name for name in inputs if not {name, stage.stage_of(name, stages)} & {s.view.name for s in stages}
    ]
    return [
        *("…/" + Path(name).name if Path(name).is_absolute() else name for name in outside),
        *stage.view.parents,
    ]


def families(stages: Sequence[Evidence]) -> list[tuple[str, Markup]]:
    """Returns a drawing of the lineage of each trained model from which no other stage was trained."""
    models = [stage for stage in stages if stage.result and "checkpoint" in stage.result.outputs]
    used = {parent for stage in models for parent in stage.view.parents}
    found = []
    for stage in (stage for stage in models if stage.view.name not in used):
        run_dir = stage.view.run_dir
        ancestor = lineage(run_dir)
        found.append((stage.view.name, Markup(family_svg(ancestor, data_of(ancestor, run_dir.parents[1])))))
    return found


def published(stages: Sequence[Evidence]) -> list[tuple[Evidence, str]]:
    """Returns every finished publication and its location: a folder, or the Hub with branch, commit and
    tag."""
    rows = []
    for stage in stages:
        config = stage.request.config if stage.request else None
        if stage.result is None or not isinstance(config, Publication):
            continue
        try:
            receipt = json.loads((stage.view.run_dir / stage.result.outputs["hub"]).read_text())
            where = (
                f"{receipt['repo_id']}, branch {config.branch}, tag {receipt['tag']}, commit"
                f" {receipt['commit'][:12]}"
            )
        except (OSError, ValueError, KeyError):
            where = f"not sent to the Hub; in stages/{stage.view.run_dir.name}"
        rows.append((stage, where))
    return rows


def environments(stages: Sequence[Evidence]) -> list[tuple[str, list[str]]]:
    """Returns each set of versions with the stages that ran with it."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.result:
            versions = ", ".join(f"{name} {version}" for name, version in stage.result.environment.items())
            found.setdefault(versions, []).append(stage.view.name)
    return list(found.items())


def config_text(stage: Evidence) -> str | None:
    """Returns the stage's configuration as JSON without passwords in URLs; None if it has no readable
    `config.json`."""
    if stage.request is None:
        return None
    config = {"seed": stage.request.seed, **stage.request.config.model_dump(mode="json")}
    return without_passwords(json.dumps(config, indent=2, ensure_ascii=False))
