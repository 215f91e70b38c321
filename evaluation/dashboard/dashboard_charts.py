"""Draws curves as SVG without matplotlib, in a small panel for each chart of the stage's kind, with one line
per run and metric.

A panel takes about a millisecond, because an open page redraws all of them at each new step. Colours match
the report's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_core.config import KINDS
from rlhf_core.config.metrics.metric import Panel

COLOURS = ("#2563a8", "#d9822b", "#2e8b6f", "#a8437a", "#6f5bb0", "#7a8794", "#b8a11f", "#3aa0b8")
FLAT = 1e-5  # relative difference below which values are drawn as a flat line
WIDTH = 340.0
HEIGHT = 170.0
LEFT = 46.0
RIGHT = 8.0
TOP = 8.0
BOTTOM = 18.0
MAX_OTHERS = 60  # panels for metrics that no chart of the kind has
Points = Sequence[tuple[float, float]]


class CurveLine(NamedTuple):
    """A line of a panel. `path`: SVG path data; `band`: path of the area around the line, '' for none;
    `dots`: (x, y) of the points if there are few; `last`: the last value."""

    label: str
    colour: str
    dashed: bool
    path: str
    band: str
    dots: list[tuple[float, float]]
    last: float


class AxisTick(NamedTuple):
    """A label on an axis at a position in the drawing."""

    at: float
    text: str


class DrawnPanel(NamedTuple):
    """A panel. `level`: y of the dashed line for "no difference"; `missing`: number of values that are not
    finite."""

    title: str
    lines: list[CurveLine]
    marks_x: list[AxisTick]
    marks_y: list[AxisTick]
    level: float | None
    missing: int


class LabelledCurves(NamedTuple):
    """The curves of one stage. `label`: the stage's label when several are compared; `bad`: number of values
    that are not finite, by metric."""

    label: str
    curves: Mapping[str, Points]
    bad: Mapping[str, int]


def main_panels(kind: str, runs: Sequence[LabelledCurves]) -> list[DrawnPanel]:
    """Returns the panels that have points, of the panels that the report shows for this kind of stage."""
    panels = KINDS[kind].panels if kind in KINDS else ()
    return [drawn for panel in panels if (drawn := draw(panel, runs))]


def other_panels(kind: str, runs: Sequence[LabelledCurves]) -> list[DrawnPanel]:
    """Returns a panel for each other metric with more than one step, at most MAX_OTHERS."""
    shown = {metric for panel in (KINDS[kind].panels if kind in KINDS else ()) for metric in panel.lines}
    names = dict.fromkeys(
        name for run in runs for name in run.curves if name not in shown and len(run.curves[name]) > 1
    )
    drawn = (draw(Panel(name, {name: ""}), runs) for name in list(names)[:MAX_OTHERS])
    return [panel for panel in drawn if panel]


def draw(panel: Panel, runs: Sequence[LabelledCurves]) -> DrawnPanel | None:
    """Lays out a panel. Returns None when there are neither points nor values that are not finite."""
    found = [
        (run, metric, label) for run in runs for metric, label in panel.lines.items() if metric in run.curves
    ]
    points = [point for run, metric, _ in found for point in run.curves[metric]]
    missing = sum(run.bad.get(metric, 0) for run, metric, _ in found)
    if not points:
        return DrawnPanel(panel.title, [], [], [], None, missing) if missing else None
    x0 = min(x for x, _ in points)
    x1 = max(x for x, _ in points)
    bands = [_band(panel, run) for run in runs]
    values = (
        [y for _, y in points]
        + ([panel.level] if panel.level is not None else [])
        + [y for band in bands for _, y in band]
    )
    y0 = min(values)
    y1 = max(values)
    if math.isclose(y0, y1, rel_tol=FLAT):
        y0 = y0 - (abs(y0) or 1.0) / 2
        y1 = y1 + (abs(y1) or 1.0) / 2

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (0.5 if x1 == x0 else (value - x0) / (x1 - x0))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (
            0.5 if not math.isfinite(y1 - y0) else (y1 - value) / (y1 - y0)
        )

    lines = []
    for nth, (run, metric, label) in enumerate(found):
        placed = [(x(step), y(value)) for step, value in run.curves[metric]]
        if not placed:
            continue
        first = metric == next(iter(panel.lines))
        band = _path([(x(step), y(value)) for step, value in bands[runs.index(run)]]) if first else ""
        colour = COLOURS[(runs.index(run) if len(runs) > 1 else nth) % len(COLOURS)]
        dashed = len(runs) > 1 and not first
        named = " ".join(part for part in (run.label, label) if part)
        lines.append(
            CurveLine(
                named,
                colour,
                dashed,
                _path(placed),
                band,
                placed if len(placed) < 8 else [],
                run.curves[metric][-1][1],
            )
        )
    at = ticks(y0, y1)
    digits = (
        math.ceil(math.log10(max(map(abs, at)) / (at[1] - at[0]))) + 1 if len(at) > 1 and at[1] > at[0] else 3
    )
    marks_y = [AxisTick(y(value), f"{value:.{min(max(digits, 3), 8)}g}") for value in at]
    marks_x = (
        [AxisTick(x(x1), f"{x1:g}")] if x1 == x0 else [AxisTick(x(x0), f"{x0:g}"), AxisTick(x(x1), f"{x1:g}")]
    )
    return DrawnPanel(
        panel.title, lines, marks_x, marks_y, None if panel.level is None else y(panel.level), missing
    )


def _band(panel: Panel, run: LabelledCurves) -> list[tuple[float, float]]:
    """Returns the outline of the first line plus and minus `panel.band`; [] if it has none."""
    spread = dict(run.curves.get(panel.band or "", ()))
    middle = [(step, value) for step, value in run.curves.get(next(iter(panel.lines)), ()) if step in spread]
    upper, lower = ([(step, value + sign * spread[step]) for step, value in middle] for sign in (1, -1))
    return upper + lower[::-1] if all(math.isfinite(value) for _, value in upper + lower) else []


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def ticks(low: float, high: float) -> list[float]:
    """Returns at most six round values in [low, high]; only `low` if the range is empty or infinite."""
    span = high - low
    if not (0 < span < math.inf):
        return [low]
    unit = 10.0 ** math.floor(math.log10(span))
    step = next(factor * unit for factor in (0.2, 0.5, 1.0, 2.0) if span / (factor * unit) <= 5)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)] or [low]
