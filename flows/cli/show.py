"""Consoles and exit codes of all commands, their tables, and the docs of all config fields."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli.artifacts_history import ListedStage, SurveyedItem
from rlhf_core.config import KINDS, Recipe
from rlhf_core.hub.revisions import PINS
from rlhf_core.recipe.dry_run import Outlook
from rlhf_core.recipe.plan import Plan
from rlhf_core.recipe.sentences import models_in
from rlhf_core.runs.differences import RunDifference
from rlhf_core.runs.lineage import Ancestor, Dataset, stages, tree
from rlhf_core.runs.run_records import RunRecord
from rlhf_core.system.markdown_table import table

if TYPE_CHECKING:  # scipy is imported by these, and most commands do not need it
    from evaluation.scores.arena_hard import IntervalEstimate
    from evaluation.scores.leaderboard import Board
    from rlhf_core.migrate.script import Migrated

OK = 0
FAILED = 1
WAITS = 4
INTERRUPTED = 130
TERMINATED = 143  # a stage's process also uses WRONG_INPUT and ENVIRONMENT, 2 and 3
RecipePlace = Annotated[
    str, Parameter(help="YAML file, or its URI (https://, or what fsspec knows, such as s3://).")
]
Whole = Annotated[int, Parameter(converter=lambda kind, tokens: whole_number(tokens[0].value))]
Override = Annotated[
    str, Parameter(help="STAGE.FIELD=VALUE, such as ppo.actor_learning_rate=5e-7, or seed=1.")
]
COLOURS = dict.fromkeys(("skip", "fetch", "done", "skipped"), "green") | {
    "run": "cyan",
    "failed": "red",
    "not run": "dim",
}

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def require_folder(folder: Path) -> None:
    """Raises ValueError when the folder of a recipe's report does not exist."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: there is no such folder: give that of the recipe's report, ARTIFACTS/NAME"
        )


def table_of(
    *columns: str, title: str | None = None, whole: Sequence[str] = (), right: Sequence[str] = ()
) -> Table:
    """Returns an empty table. `whole`: columns whose cells never wrap; `right`: columns of numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, overflow="fold", no_wrap=column in whole, justify="right" if column in right else "left"
        )
    return table


def show_pins(planned: Plan) -> None:
    """Prints the Hub branches and tags that a recipe names, with their commits."""
    for pin in planned.pins:
        console.print(
            f"{pin.reference} is commit {pin.commit}, kept in {planned.folder / PINS}",
            markup=False,
            highlight=False,
        )


def show_plan(console: Console, plan: Plan, lines: Sequence[Outlook]) -> None:
    """Prints the DAG as a table, parents first: what a run would do with each stage, and why."""
    columns = ("stage", "kind", "needs", "digest", "action", "why")
    table = table_of(*columns, title=f"recipe {plan.recipe.name}", whole=("stage", "digest", "action"))
    for node, action, why in lines:
        inputs = [*node.models, *node.parents]
        table.add_row(
            node.name,
            node.kind,
            ", ".join(inputs),
            node.digest,
            f"[{COLOURS.get(action, 'yellow')}]{action}[/]",
            why,
        )
    console.print(table)
    counts = {
        action: sum(line.action == action for line in lines) for action in ("run", "resume", "skip", "fetch")
    }
    summary = f"{counts['run']} to run, {counts['resume']} to resume, {counts['skip']} to skip"
    summary += f", {counts['fetch']} to fetch from {plan.recipe.store}" if plan.recipe.store else ""
    console.print(f"{summary}; artifacts in {plan.artifacts}")


def show_board(console: Console, board: Board) -> None:
    """Prints a leaderboard in percent, best model first, and the effects of style."""
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
        console.print(
            "there are no runs in this folder yet: `alignflow run RECIPE` makes one", highlight=False
        )
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
        console.print(f"{run.id} failed before its first stage: {run.why}", markup=False, highlight=False)
    console.print(f"{len(runs)} runs")


def show_stages(console: Console, found: Sequence[ListedStage]) -> None:
    """Prints the stages of an artifacts folder as a table."""
    if not found:
        console.print(
            "there are no stages in this folder yet: `alignflow run RECIPE` makes them", highlight=False
        )
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
    """Prints that the stores' copies were neither listed nor removed."""
    for store in stores:
        console.print(f"{store}: a store, which was not read", markup=False, highlight=False)


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
    """Prints the tree of ancestors, the data of their stages, and the versions they ran with."""
    console.print(tree(ancestor), markup=False, highlight=False)
    if data:
        console.print("\ndata, with the digest of its content today:")
    for stage, field, name, digest in data:
        console.print(f"  {stage}.{field}: {name} {digest or '(not here)'}", markup=False, highlight=False)
    versions: dict[str, list[str]] = {}
    for node in stages(ancestor):
        if node.environment:
            text = ", ".join(f"{package} {version}" for package, version in node.environment.items())
            versions.setdefault(text, []).append(node.name)
    if versions:
        console.print("\nversions:")
    for text, names in versions.items():
        console.print(f"  {', '.join(names)}: {text}", markup=False, highlight=False)


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
            lines.append(("removed" if item.path in removed else "in use, stays", item))
    for what, item in lines:
        console.print(
            f"{what:13} {item.size / 2**20:10.1f} MiB  {item.path}  ({item.why})",
            markup=False,
            highlight=False,
        )
    whole = sum(item.size for item in garbage if removed is None or item.path in removed)
    end = "; --delete removes them" if removed is None else " were removed"
    if not garbage:
        end = ""
    count = len(garbage) if removed is None else len(removed)
    console.print(
        f"{len(kept)} stages are kept; {count} folders, {whole / 2**20:.1f} MiB{end}", highlight=False
    )


def show_migration(console: Console, out: Path, found: Migrated) -> None:
    """Prints how every flag of a launch script was translated, and the next command."""
    table = table_of("stage", "flag", "became", "line", whole=["stage"])
    colours = {"translated": "green", "approximated": "yellow", "dropped": "red"}
    for what, colour in colours.items():
        for note in (note for note in found.notes if note.what == what):
            text = f"{what}: {note.text}" if what != "translated" else note.text
            table.add_row(
                note.stage,
                escape(note.flag),
                f"[{colour}]{escape(text)}[/]",
                str(note.line) if note.line else "",
            )
    console.print(table)
    for remark in found.remarks:
        console.print(f"line {remark.line}: {remark.text}", markup=False, highlight=False)
    counts = [f"{sum(note.what == what for note in found.notes)} {what}" for what in colours]
    console.print(
        f"{out}: {len(found.recipe.stages)} stages, flags: {', '.join(counts)}; next: alignflow validate"
        f" {out} --here",
        markup=False,
    )


def config_docs() -> str:
    """Returns every field of a recipe as markdown: name, type, default, meaning. A field shared by several
    classes is listed once."""
    parts: dict[str, type[BaseModel]] = {}
    pages = [_section("Recipe", Recipe, parts)]
    written: set[str] = set()
    for stage, kind in KINDS.items():
        pages.append(_section(f"Stage `{stage}`", kind.config, parts))
        for group in _own_groups(kind.config):
            written.add(group.__name__)
            pages.append(_section(group.__name__, group, parts))
    while rest := [name for name in parts if name not in written]:
        for name in rest:
            written.add(name)
            pages.append(_section(name, parts[name], parts))
    head = (
        "# Configuration\n\nMade by `alignflow config-docs` from `rlhf_core/config/`. A field without a"
        " default must be given.\n"
    )
    return "\n".join([head, *pages])


def _own_groups(config: type[BaseModel]) -> list[type[BaseModel]]:
    """Returns the groups of fields that no other stage takes, lowest first."""
    configs = [kind.config for kind in KINDS.values()]
    groups = []
    for base in reversed(config.__bases__):
        users = [other for other in configs if issubclass(other, base)]
        if users == [config]:
            groups.append(base)
    return groups


def _section(title: str, model: type[BaseModel], parts: dict[str, type[BaseModel]]) -> str:
    about = [_text(model.__doc__), ""] if model.__doc__ else []
    bases = [base for base in model.__bases__ if issubclass(base, BaseModel) and base.model_fields]
    stages = {kind.config: name for name, kind in KINDS.items()}  # they have their own sections
    for base in bases:
        if base not in stages:
            parts.setdefault(base.__name__, base)
    if bases:
        links = (
            f"[{base.__name__}](#{f'stage-{stages[base]}' if base in stages else base.__name__.lower()})"
            for base in bases
        )
        about += [f"Takes the fields of {', '.join(links)} as well.", ""]
    rows = []
    for name, info in model.model_fields.items():
        if name not in model.__annotations__:
            continue
        for part in models_in(info.annotation) if name != "stages" else ():
            parts.setdefault(part.__name__, part)
        kind = "stages by name" if name == "stages" else _text(_type_text(info.annotation))
        rows.append((f"`{name}`", kind, _default(info), _text(info.description or "")))
    fields = [table(("field", "type", "default", "meaning"), rows)] if rows else []
    return "\n".join([f"## {title}\n", *about, *fields])


def _type_text(annotation: Any) -> str:
    """Returns a type as text for recipe authors, without modules, constraints and typing's names."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation is Ellipsis:
        return "..."
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return " / ".join(repr(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_text(argument) for argument in arguments)
    name = "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(_type_text, arguments))}]" if arguments else name


def _default(info: FieldInfo) -> str:
    value: Any = info.default
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        return ", ".join(f"`{type(item).__name__}`" for item in value)
    return "none" if value is None else f"`{_text(str(value))}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("{}", "`{}`")


def whole_number(text: str) -> int:
    """Parses the value of an option. Raises ValueError for 1.5, which the parser would round."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None
