"""Commands for a regression suite (`alignflow suite`): questions that a model lost or a person reported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from flows.cli.show import OK, console, say, table_of
from rlhf_core.data.suite import add_to_suite, read_suite

Suite = Annotated[Path, Parameter(help="The suite's file; lines are only appended to it.")]
suite_app = App(name="suite", help="The questions of a regression suite.")


@suite_app.command
def add(
    source: Path,
    *,
    model: str | None = None,
    lost_to: str | None = None,
    judge: str | None = None,
    reason: str = "",
    suite: Suite = Path("suite.jsonl"),
) -> int:
    """Add questions that a model lost in an evaluation, or that people reported; questions already in the
    suite are skipped.

    Args:
        source: the directory ARTIFACTS/stages/NAME-DIGEST of a finished evaluation, or a file of questions
            with prompt and reason (.jsonl).
        model: for an evaluation: the model; the questions that it lost in both games are added.
        lost_to: the model that it lost to; default: the evaluation's baseline.
        judge: the judge that decides; default: the evaluation's first.
        reason: reason for the questions of a file that give none.
    """
    if source.is_dir():
        from evaluation.regression.lost import lost_questions

        if model is None:
            raise ValueError(f"{source}: give --model, the model whose lost questions to add")
        found = lost_questions(source, model, lost_to, judge)
    elif not source.exists():
        raise ValueError(
            f"{source}: this file or directory does not exist: give ARTIFACTS/stages/NAME-DIGEST of a"
            " finished evaluation"
        )
    elif model or lost_to or judge:
        raise ValueError(
            f"{source} is not a directory, but --model, --lost-to and --judge apply only to an evaluation's"
            " directory: leave them out"
        )
    else:
        found = read_suite(source, reason)
    added = add_to_suite(suite, found)
    say(f"{suite}: added {len(added)} questions; {len(found) - len(added)} were already there")
    return OK


@suite_app.command(name="list")
def list_questions(suite: Suite = Path("suite.jsonl")) -> int:
    """List the questions of a suite with their ids and reasons, oldest first."""
    table = table_of("question", "added", "reason", "source", "prompt")
    for question in read_suite(suite):
        prompt = " ".join(question.text.split())
        cells = (
            question.uid,
            question.added[:10],
            question.reason,
            question.source,
            prompt[:60] + ("..." if len(prompt) > 60 else ""),
        )
        table.add_row(*map(escape, cells))
    console.print(table)
    return OK
