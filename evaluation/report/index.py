"""Writes `<artifacts>/index.html`, with a table of every recipe's last run, from `run.json` and
`summary.json`, and a table of the newest runs of all recipes. Both link to the runs' pages.

A folder whose records are missing or damaged gets a row with the state `damaged`; the other rows are not
affected.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from evaluation.report.template import duration, fill, percent
from rlhf_core.config import KINDS
from rlhf_core.runs.run_records import PAGE, RUN, records
from rlhf_core.system.files import write_text

INDEX = "index.html"
SUMMARY = "summary.json"
REPORT = "report.html"
MAX_RUNS = 200  # in the table of all runs


class RecipeLine(NamedTuple):
    """A recipe's last run. `state`: done, failed, stopped at a gate, unfinished or damaged; `gates`: the
    failed gates as text."""

    name: str
    page: str
    state: str
    when: datetime
    stages: str
    time: str
    metrics: tuple[str, ...]
    gates: tuple[str, ...]
    passed: int


class RunLine(NamedTuple):
    """A run in the table of all runs. `page`: address of its page, '' if it has none."""

    recipe: str
    label: str
    page: str
    state: str
    when: datetime


def write_index(artifacts: Path) -> Path:
    """Writes the page atomically and returns its path. Raises ValueError when the folder has no runs."""
    folders = [file.parent for file in artifacts.glob(f"*/{RUN}")]
    if not folders:
        raise ValueError(
            f"{artifacts} holds no runs: give the `artifacts` folder of recipes, or the folder of one run"
        )
    lines = sorted((line_of(folder) for folder in folders), key=lambda line: line.when, reverse=True)
    write_text(artifacts / INDEX, fill("index.html.j2", lines=lines, runs=run_lines(artifacts)))
    return artifacts / INDEX


def run_lines(artifacts: Path) -> list[RunLine]:
    """Returns the newest runs of all recipes that have their own record, at most MAX_RUNS, newest first."""
    found = [run for run in records(artifacts) if run.file.name != RUN]
    lines = []
    for run in found[:MAX_RUNS]:
        page = run.file.with_suffix(PAGE)
        address = quote(page.relative_to(artifacts).as_posix()) if page.is_file() else ""
        lines.append(RunLine(run.recipe, run.label, address, run.state, datetime.fromtimestamp(run.started)))
    return lines


def line_of(folder: Path) -> RecipeLine:
    """Returns the row of a folder. Records may have any content; unexpected content gives the state
    `damaged`."""
    when = datetime.fromtimestamp((folder / RUN).stat().st_mtime if (folder / RUN).exists() else 0)
    page = f"{quote(folder.name)}/{REPORT}" if (folder / REPORT).is_file() else ""
    try:
        run = json.loads((folder / RUN).read_text())
        summary = (
            json.loads((folder / SUMMARY).read_text())
            if (folder / SUMMARY).is_file()
            else {"stages": [], "evaluation": None}
        )
        return _line(folder.name, page, when, run, summary)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return RecipeLine(folder.name, page, "damaged", when, "", "", (), (), 0)


def _line(name: str, page: str, when: datetime, run: dict[str, Any], summary: dict[str, Any]) -> RecipeLine:
    statuses = [stage["status"] for stage in run["stages"]]
    gates = [gate | {"stage": stage["name"]} for stage in summary["stages"] for gate in stage["gates"]]
    failed = [gate for gate in gates if not gate["passed"]]
    done = sum(status in ("done", "skipped") for status in statuses)
    if done == len(statuses):
        state = "done"
    elif "failed" in statuses:
        state = "failed"
    else:
        state = "stopped at a gate" if any(gate["on_fail"] != "warn" for gate in failed) else "unfinished"
    seconds = [float(stage["seconds"]) for stage in summary["stages"] if stage["seconds"] is not None]
    return RecipeLine(
        name,
        page,
        state,
        when,
        f"{done} of {len(statuses)}",
        duration(sum(seconds)) if seconds else "",
        tuple(_metrics(summary)),
        tuple(
            f"{gate['stage']}: {gate['metric']} {_number(gate['value'])} ({gate['on_fail']})"
            for gate in failed
        ),
        len(gates) - len(failed),
    )


def _metrics(summary: dict[str, Any]) -> list[str]:
    texts = []
    for name, kind in KINDS.items():
        metric = kind.main[0] if kind.output == "checkpoint" and kind.main else ""
        found = [
            stage
            for stage in summary["stages"]
            if stage["stage"] == name and stage["metrics"].get(metric) is not None
        ]
        texts += [f"{found[-1]['name']}: {metric} {_number(found[-1]['metrics'][metric])}"] if found else []
    won = summary["evaluation"]
    if won:
        interval = f"{percent(float(won['ci_low']))} to {percent(float(won['ci_high']))}"
        texts.insert(0, f"{won['model']}: win rate {percent(float(won['win_rate']))} ({interval})")
    return texts


def _number(value: float | None) -> str:
    return "missing" if value is None or not math.isfinite(value) else f"{value:.3g}"
