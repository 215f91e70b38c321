"""Compares two stages or two runs: the differences in their configurations and results, and their curves in
shared panels."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from evaluation.dashboard import dashboard_charts
from evaluation.dashboard.artifacts_folder import STAGES, Folder, Missing
from rlhf_core.runs.differences import RunDifference, changed, stage_differences
from rlhf_core.runs.run_records import RunRecord

MAX_DIFFERENCES = 500
MAX_TEXT = 300


class Side(NamedTuple):
    """One of the two compared stages or runs. `title`: its name; `link`: its page; `stages`: run directories
    by stage name; `run`: None for a stage."""

    title: str
    link: str
    stages: dict[str, str]
    run: RunRecord | None = None


class Overlay(NamedTuple):
    """The curves of a stage that both runs have."""

    stage: str
    panels: list[dashboard_charts.DrawnPanel]


def side(folder: Folder, given: str) -> Side:
    """Returns the stage or run that an address names, as a run directory or as RECIPE/RUN. Raises Missing
    when it does not exist.
    """
    recipe, _, identity = given.rpartition("/")
    if not recipe:
        name = folder.request(folder.stage(given)).get("name", given)
        return Side(given, f"/stage/{given}", {str(name): given})
    run = folder.run(recipe, identity)
    stages = {stage.name: stage.run_dir.partition("/")[2] for stage in run.stages}
    return Side(f"{run.recipe} {run.label}", f"/run/{quote(recipe)}/{quote(identity)}", stages, run)


def differences(folder: Folder, one: Side, other: Side) -> list[RunDifference]:
    """Returns at most MAX_DIFFERENCES differences, with values truncated to MAX_TEXT characters."""
    found: list[RunDifference] = []
    if one.run and other.run:
        tops = [folder.json(run.file).get("config") for run in (one.run, other.run)]
        recipes = [
            {k: v for k, v in top.items() if k != "stages"} if isinstance(top, dict) else {} for top in tops
        ]
        found += [RunDifference("", "recipe", *change) for change in changed(*recipes)]
    for name, mine, theirs in _pairs(one, other):
        if not mine or not theirs:
            found.append(
                RunDifference(
                    name, "stages", "", *("there" if there else "not there" for there in (mine, theirs))
                )
            )
        elif mine != theirs:
            try:
                found += stage_differences(name, folder.stage(mine), folder.stage(theirs), read=folder.json)
            except (Missing, AttributeError, TypeError):  # removed, or a damaged record
                continue
    return [
        one._replace(before=_short(one.before), after=_short(one.after)) for one in found[:MAX_DIFFERENCES]
    ]


def overlays(folder: Folder, one: Side, other: Side) -> list[Overlay]:
    """Returns the curves of all stages that both runs have, in the order of the first run."""
    found = []
    for name, mine, theirs in _pairs(one, other):
        try:
            dirs = [folder.stage(run_dir) for run_dir in dict.fromkeys((mine, theirs)) if run_dir]
        except Missing:
            continue
        kind = str(folder.request(dirs[0]).get("config", {}).get("stage", ""))
        labels = ("first", "second") if len(dirs) == 2 else ("both",)
        runs = [drawable(folder, run_dir.name, label) for run_dir, label in zip(dirs, labels, strict=True)]
        if mine and theirs and (panels := dashboard_charts.main_panels(kind, runs)):
            found.append(Overlay(name, panels))
    return found


def drawable(folder: Folder, run_dir: str, label: str = "") -> dashboard_charts.LabelledCurves:
    """Returns the curves of a stage as dashboard_charts.py needs them."""
    found = folder.curves(folder.path / STAGES / run_dir)
    return dashboard_charts.LabelledCurves(label, found.points, found.not_finite)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _pairs(one: Side, other: Side) -> list[tuple[str, str, str]]:
    """Returns (stage, run directory in the first run, run directory in the second), with '' for a run that
    lacks the stage. Two single stages always form a pair."""
    if not one.run and not other.run:
        (name, mine), (_, theirs) = *one.stages.items(), *other.stages.items()
        return [(name, mine, theirs)]
    return [
        (name, one.stages.get(name, ""), other.stages.get(name, ""))
        for name in {**one.stages, **other.stages}
    ]
