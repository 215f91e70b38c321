"""Defines the consoles, exit codes and option types that all commands share, and prints plans and
migrations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli.dry_run import Outlook
from rlhf_core.hub.revisions import PINS
from rlhf_core.recipe.plan import Plan

if TYPE_CHECKING:  # these import scipy, which most commands do not need
    from rlhf_core.migrate.script import Migrated

OK = 0
FAILED = 1
WAITS = 4
INTERRUPTED = 130
TERMINATED = 143  # a stage's process also uses WRONG_INPUT and ENVIRONMENT, 2 and 3
RecipePlace = Annotated[
    str, Parameter(help="YAML file, or its URI (https://, or any other that fsspec reads, such as s3://).")
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


def say(text: object, to: Console = console) -> None:
    """Prints text verbatim, without markup or highlighting."""
    to.print(text, markup=False, highlight=False)


def require_folder(folder: Path) -> None:
    """Raises ValueError when the folder of a recipe's report does not exist."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: this folder does not exist: give the folder of the recipe's report, ARTIFACTS/NAME"
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
        say(f"{pin.reference} is commit {pin.commit}, kept in {planned.folder / PINS}")


def show_plan(console: Console, plan: Plan, lines: Sequence[Outlook]) -> None:
    """Prints the DAG as a table, parents first, with what a run would do with each stage, and why."""
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
        say(f"line {remark.line}: {remark.text}", console)
    counts = [f"{sum(note.what == what for note in found.notes)} {what}" for what in colours]
    console.print(
        f"{out}: {len(found.recipe.stages)} stages, flags: {', '.join(counts)}; next: alignflow validate"
        f" {out} --here",
        markup=False,
    )


def whole_number(text: str) -> int:
    """Parses the integer value of an option. Raises ValueError for 1.5, which the command parser would
    round."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
