"""Prints runs, stages, differences, lineage, garbage and leaderboards as tables, for the commands on
results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from flows.cli.results.artifacts_history import ListedStage, SurveyedItem
from flows.cli.show import COLOURS, say, table_of
from rlhf_core.runs.differences import RunDifference
from rlhf_core.runs.lineage import Ancestor, Dataset, stages, tree
from rlhf_core.runs.run_records import RunRecord

if TYPE_CHECKING:  # these import scipy, which most commands do not need
    from evaluation.scores.arena_hard import IntervalEstimate
    from evaluation.scores.leaderboard import Board


def show_board(console: Console, board: Board) -> None:
    """Prints a leaderboard in percent, best model first, and the style effects."""
    title = f"{board.category}, against {board.baseline}, judge {board.judge} (95 % intervals over questions)"
    numbers = (
        "score",
        "interval",
        "style-controlled",
        "interval",
        "questions",
        "failed",
        "same swapped",
        "tokens",
    )
    table = table_of("model", *numbers, title=title, whole=["model"], right=numbers)
    for row in board.standings:
        cells = [text for estimate in (row.score, row.controlled) for text in _estimate(estimate)]
        tokens = "" if row.tokens is None else f"{row.tokens:.0f}"
        table.add_row(
            row.model,
            *cells,
            str(row.questions),
            str(row.failed),
            f"{100 * row.swap_consistency:.0f} %",
            tokens,
        )
    console.print(table, markup=False)
    if board.effects:
        effects = [
            f"{name} {e.value:+.2f} ({e.low:+.2f} to {e.high:+.2f})" for name, e in board.effects.items()
        ]
        console.print(f"style effects, log-odds of a typical difference: {', '.join(effects)}", markup=False)
    console.print()


def _estimate(estimate: IntervalEstimate | None) -> tuple[str, str]:
    if estimate is None:
        return "", ""
    return f"{100 * estimate.value:.1f}", f"{100 * estimate.low:.1f} - {100 * estimate.high:.1f}"


def show_runs(
    console: Console, runs: Sequence[RunRecord], stages: Sequence[ListedStage], as_json: bool
) -> None:
    """Prints the runs of an artifacts folder as a table or JSON. `stages` are the stages in the folder."""
    known = {f"stages/{stage.path.name}": stage for stage in stages}
    lines = []
    for run in runs:
        found = [known[stage.run_dir] for stage in run.stages if stage.run_dir in known]
        rates = [
            stage.metric.removeprefix("win_rate/") for stage in found if stage.metric.startswith("win_rate/")
        ]
        lines.append((run, sum(stage.state == "done" for stage in found), rates[-1] if rates else None))
    if as_json:
        made = [
            run.model_dump(mode="json") | {"stages_done": done, "win_rate": rate} for run, done, rate in lines
        ]
        print(json.dumps(made, indent=2))
        return
    if not runs:
        console.print("this folder has no runs yet: start one with `alignflow run RECIPE`", highlight=False)
        return
    columns = ("id", "name", "pinned", "state", "started", "recipe", "stages", "win rate")
    table = table_of(*columns, whole=("id", "state", "started", "stages"))
    for run, done, rate in lines:
        when = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M}"
        count = f"{done} of {len(run.stages)} done"
        cells = (
            run.id,
            run.name or "",
            "pinned" if run.pinned else "",
            run.state,
            when,
            run.recipe,
            count,
            rate or "",
        )
        table.add_row(*map(escape, cells))
    console.print(table)
    for run in (run for run in runs if run.why):
        say(f"{run.id} failed before its first stage: {run.why}", console)
    console.print(f"{len(runs)} runs")


def show_stages(console: Console, found: Sequence[ListedStage]) -> None:
    """Prints the stages of an artifacts folder as a table."""
    if not found:
        console.print("this folder has no stages yet: run some with `alignflow run RECIPE`", highlight=False)
        return
    columns = ("stage", "kind", "digest", "when", "seconds", "state", "metric")
    table = table_of(*columns, whole=("stage", "digest", "when", "state"))
    for run in found:
        seconds = "" if run.seconds is None else f"{run.seconds:.0f}"
        state = f"[{COLOURS.get(run.state, 'yellow')}]{run.state}[/]"
        table.add_row(
            escape(run.name),
            run.kind,
            run.digest,
            f"{run.when:%Y-%m-%d %H:%M}",
            seconds,
            state,
            escape(run.metric),
        )
    console.print(table)
    console.print(f"{len(found)} stages, {sum(run.state == 'done' for run in found)} done")


def show_stores(console: Console, stores: Sequence[str]) -> None:
    """Prints a note that the copies in stores were neither listed nor removed."""
    for store in stores:
        say(f"{store}: this store was not read", console)


def show_differences(console: Console, found: Sequence[RunDifference]) -> None:
    """Prints the differences between two runs as a table."""
    if not found:
        console.print("no difference")
        return
    table = table_of("stage", "part", "what", "before", "after")
    for change in found:
        table.add_row(*map(escape, change))
    console.print(table)


def show_lineage(console: Console, ancestor: Ancestor, data: Sequence[Dataset]) -> None:
    """Prints the tree of ancestors, the data of their stages, and the versions of the packages."""
    say(tree(ancestor), console)
    if data:
        console.print("\ndata, with the digest of its content today:")
    for stage, field, name, digest in data:
        say(f"  {stage}.{field}: {name} {digest or '(not here)'}", console)
    versions: dict[str, list[str]] = {}
    for node in stages(ancestor):
        if node.environment:
            text = ", ".join(f"{package} {version}" for package, version in node.environment.items())
            versions.setdefault(text, []).append(node.name)
    if versions:
        console.print("\nversions:")
    for text, names in versions.items():
        say(f"  {', '.join(names)}: {text}", console)


def show_garbage(
    console: Console, kept: Sequence[SurveyedItem], garbage: Sequence[SurveyedItem], removed: set[Path] | None
) -> None:
    """Prints what is kept and what can be removed, with sizes. `removed`: the removed paths; None without
    --delete."""
    lines = [("keep", item) for item in kept]
    for item in garbage:
        if removed is None:
            lines.append(("remove", item))
        else:
            lines.append(("removed" if item.path in removed else "in use, kept", item))
    for what, item in lines:
        say(f"{what:13} {item.size / 2**20:10.1f} MiB  {item.path}  ({item.why})", console)
    whole = sum(item.size for item in garbage if removed is None or item.path in removed)
    end = "; --delete removes them" if removed is None else " were removed"
    if not garbage:
        end = ""
    count = len(garbage) if removed is None else len(removed)
    console.print(
        f"{len(kept)} stages are kept; {count} folders, {whole / 2**20:.1f} MiB{end}", highlight=False
    )
