"""Draws one moment of a run for a terminal, with a line for each stage that is exactly one row high at any
width.

Reads no files and has no clock: watch.py determines the contents, and live.py the times of drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

BAR = 20
NARROW = 64  # BAR: cells of a bar; NARROW: a terminal with fewer columns is too narrow for one
MARKS = {"done": "✓", "skipped": "✓", "failed": "✗", "running": "▶", "waiting": "·"}
PLAIN_MARKS = {"done": "+", "skipped": "+", "failed": "x", "running": ">", "waiting": "."}
COLOURS = {"done": "green", "skipped": "green", "failed": "red", "running": "cyan", "waiting": "dim"}
ALWAYS = ("running", "failed")  # states of stages that are always shown


class StageLine(NamedTuple):
    """The line of a stage. `state`: a key of MARKS; `seconds`: its run time, so far or in total; `steps`:
    (done, all); `left`: estimated seconds until all steps are done; `text`: its activity or last message, the
    reason why it waits, or its result."""

    name: str
    state: str
    seconds: float | None = None
    steps: tuple[int, int] | None = None
    left: float | None = None
    text: str = ""


@dataclass(frozen=True)
class RunMoment:
    """A run at one moment. `doing`: the run's own activity; "" if it only waits for its stages."""

    title: str
    seconds: float
    doing: str = ""
    lines: Sequence[StageLine] = ()


def frame(moment: RunMoment, width: int, height: int, ascii_only: bool = False) -> Text:
    """Returns the rows for a terminal of this size, leaving one row for its prompt."""
    done = sum(line.state in ("done", "skipped") for line in moment.lines)
    parts = [moment.title, duration(moment.seconds)]
    parts += [f"{done} of {len(moment.lines)} stages done"] if moment.lines else []
    rows = [Text("   ".join([*parts, moment.doing]).rstrip(), style="bold")]
    shown, rest = chosen(moment.lines, max(1, height - 3))
    names = min(max((len(line.name) for line in shown), default=0), max(12, width // 3))
    rows += [_row(line, names, width, ascii_only) for line in shown]
    if rest:
        rows.append(Text(f"  and {counts(rest)}", style="dim"))
    for row in rows:
        row.truncate(width - 1, overflow="crop" if ascii_only else "ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(rows)


def chosen(lines: Sequence[StageLine], most: int) -> tuple[list[StageLine], list[StageLine]]:
    """Returns the stages to draw, in their order, and the remaining stages. If not all stages fit, draws the
    running and failed stages, and as many of the next waiting stages as fit."""
    if len(lines) <= most:
        return list(lines), []
    # a stable sort keeps the order among equals
    ranked = sorted(lines, key=lambda line: (line.state not in ALWAYS, line.state != "waiting"))
    kept = {line.name for line in ranked[: most - 1]}
    return [line for line in lines if line.name in kept], [line for line in lines if line.name not in kept]


def counts(lines: Sequence[StageLine]) -> str:
    """Returns how many stages are in each state, such as `3 done, 12 waiting`."""
    found = {state: sum(line.state == state for line in lines) for state in MARKS}
    return ", ".join(f"{count} {state}" for state, count in found.items() if count)


def duration(seconds: float) -> str:
    """Returns seconds as text, such as `45 s`, `3 min 05 s`, `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _row(line: StageLine, names: int, width: int, ascii_only: bool) -> Text:
    mark = (PLAIN_MARKS if ascii_only else MARKS)[line.state]
    cut = ".." if ascii_only else "…"
    # keep the end of a name, which tells rounds apart
    name = line.name if len(line.name) <= names else cut + line.name[len(line.name) - names + len(cut) :]
    row = Text.assemble((f"{mark} {name:{names}}", COLOURS[line.state]), "  ")
    if line.steps is not None and line.state == "running":
        _add_steps(row, line, width, ascii_only)
    elif line.state == "skipped":
        row.append("done before  ", "dim")
    elif line.seconds is not None:
        row.append(f"{duration(line.seconds)}  ")
    row.append(line.text, "dim" if line.state == "waiting" else "")
    return row


def _add_steps(row: Text, line: StageLine, width: int, ascii_only: bool) -> None:
    assert line.steps is not None
    done, whole = line.steps
    if width >= NARROW:
        filled = round(BAR * min(1.0, done / max(1, whole)))
        full, empty = ("#", "-") if ascii_only else ("━", "─")
        row.append(full * filled, "cyan").append(empty * (BAR - filled), "dim").append(" ")
    row.append(f"{done}/{whole}  ")
    if line.left is not None and done < whole:
        row.append(f"{rate(line.left / (whole - done))}  {duration(line.left)} left  ")
    elif line.seconds is not None:
        row.append(f"{duration(line.seconds)}  ")


def rate(seconds: float) -> str:
    """Returns the pace for steps of `seconds` each as text, such as `12.5/s` or `3.1 s each`."""
    return f"{1 / seconds:.1f}/s" if 0 < seconds < 1 else f"{seconds:.1f} s each"
