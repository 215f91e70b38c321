"""Draws the report's training charts, as panels of a stage's metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.report.drawing.chart_style import COLOURS, DASHED, INK, STYLE, WIDTH, short, svg
from evaluation.report.summary import Curve
from rlhf_core.config import KINDS
from rlhf_core.config.metrics.metric import Panel

MAX_POINTS = 300
FLAT = 1e-5  # relative length of an axis below which its ticks would have equal labels
ROW = 2.15  # inches: height of a row of panels
PHASES = "phase/"
X_LABEL: dict[str, Any] = {"fontsize": 7.5, "labelpad": 1.5}


class StageCurves(NamedTuple):
    """The curves of one stage, and its label when several stages (rounds) are drawn together."""

    label: str
    curves: Mapping[str, Curve]


@matplotlib.rc_context(STYLE)
def stage_chart(name: str, kind: str, runs: Sequence[StageCurves]) -> str | None:
    """Draws the curves of one stage, or of the rounds of one loop, as small panels. Returns None when there
    is nothing to draw, since a line needs two points."""
    panels = [panel for panel in KINDS[kind].panels if _longest(panel, runs) > 1]
    every = (
        {name: _points(curve) for name, curve in runs[0].curves.items() if name.startswith(PHASES)}
        if len(runs) == 1
        else {}
    )
    phases = {name: points for name, points in every.items() if len(points) > 1}
    if not panels and not phases:
        return None
    count = len(panels) + bool(phases)
    columns = 2 if count == 4 else min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(WIDTH, ROW * rows))
    grid = figure.add_gridspec(rows, columns, **_margins(columns, rows))
    for i, panel in enumerate(panels):
        _draw(figure.add_subplot(grid[i // columns, i % columns]), panel, runs, KINDS[kind].counts)
    if phases:  # last, taking the rest of its row
        _stack(
            figure.add_subplot(grid[len(panels) // columns, len(panels) % columns :]),
            phases,
            KINDS[kind].counts,
        )
    return svg(figure, f"curves of {name}")


def single_values(kind: str, runs: Sequence[StageCurves]) -> dict[str, float]:
    """Returns the values of the panels that `stage_chart` leaves out because no line has two points, keyed
    by panel title and label."""
    values = {}
    for panel in KINDS[kind].panels:
        if _longest(panel, runs) != 1:
            continue
        for run in runs:
            for metric, line_label in panel.lines.items():
                for _, value in _points(run.curves.get(metric, [])):
                    label = " ".join(part for part in (run.label, line_label) if part)
                    values[f"{panel.title} ({label})" if label else panel.title] = value
    return values


def _longest(panel: Panel, runs: Sequence[StageCurves]) -> int:
    """Returns the number of points of a panel's longest line."""
    return max(
        (len(_points(run.curves.get(metric, []))) for run in runs for metric in panel.lines), default=0
    )


def _margins(columns: int, rows: int) -> dict[str, float]:
    """Returns gridspec margins that leave fixed space for titles and labels. matplotlib's layout engines
    would draw everything twice."""
    left = 0.45
    right = 0.1
    top = 0.3
    bottom = 0.45  # all in inches
    beside = 0.5
    below = 0.68  # between panels
    panel = (WIDTH - left - right - beside * (columns - 1)) / columns
    high = (ROW * rows - top - bottom - below * (rows - 1)) / rows
    return {
        "left": left / WIDTH,
        "right": 1 - right / WIDTH,
        "top": 1 - top / (ROW * rows),
        "bottom": bottom / (ROW * rows),
        "wspace": beside / panel,
        "hspace": below / high,
    }


def _draw(ax: Axes, panel: Panel, runs: Sequence[StageCurves], counts: str) -> None:
    colours = iter(COLOURS)
    labels = 0
    if panel.level is not None:
        ax.axhline(panel.level, **DASHED | {"linewidth": 0.8})
    for run in runs:
        colour = next(colours, INK)
        for nth, (metric, line_label) in enumerate(panel.lines.items()):
            points = _points(run.curves.get(metric, []))
            if not points:
                continue
            if nth and len(runs) == 1:
                colour = next(colours, INK)
            label = " ".join(part for part in (run.label, line_label) if part)
            steps, values = zip(*points, strict=True)
            if panel.band and nth == 0:
                spread = dict(_points(run.curves.get(panel.band, [])))
                low = [v - spread.get(s, 0) for s, v in points]
                high = [v + spread.get(s, 0) for s, v in points]
                ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            dashes = "--" if nth and len(runs) > 1 else "-"
            marker = "o" if len(points) < 8 else None
            window = len(points) // 20
            if window > 1:  # draws a noisy line faintly under its running mean
                ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.7)
                values = tuple(_smooth(values, window))
            ax.plot(
                steps,
                values,
                dashes,
                color=colour,
                linewidth=1.5,
                marker=marker,
                markersize=3.5,
                label=short(label) or None,
            )
            labels += bool(label)
    ax.set_title(panel.title)
    ax.set_xlabel(counts, **X_LABEL)
    ax.margins(x=0.02)
    ax.locator_params(axis="x", nbins=5, integer=True)
    ax.locator_params(axis="y", nbins=5)
    bottom, top = ax.get_ylim()
    if math.isclose(bottom, top, rel_tol=FLAT):
        middle = (bottom + top) / 2
        ax.set_ylim(middle - abs(middle) / 2, middle + abs(middle) / 2)
    # by default, matplotlib puts a common factor above the title
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if labels > 1:
        ax.legend(loc="best", handlelength=1.4)


def _stack(ax: Axes, phases: dict[str, Curve], counts: str) -> None:
    steps = sorted({step for curve in phases.values() for step, _ in curve})
    order = sorted(phases, key=lambda phase: -sum(value for _, value in phases[phase]))
    heights = [[dict(phases[phase]).get(step, 0.0) for step in steps] for phase in order]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(order))]
    ax.stackplot(
        steps,
        heights,
        labels=[short(phase.removeprefix(PHASES)) for phase in order],
        colors=colours,
        alpha=0.8,
        linewidth=0,
    )
    ax.set_title("Where an iteration's time goes (s)")
    ax.set_xlabel(counts, **X_LABEL)
    ax.margins(x=0.005)
    # space for the legend
    ax.set_ylim(0, 1.35 * max(map(sum, zip(*heights, strict=True)), default=1.0) or 1.0)
    ax.legend(loc="upper right", ncols=8, handlelength=1, handletextpad=0.4, columnspacing=1.2)


def _points(curve: Curve) -> Curve:
    """Returns the finite points, reduced to at most MAX_POINTS by averaging neighbours."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    group = math.ceil(len(finite) / MAX_POINTS)
    if group < 2:
        return finite
    parts = [finite[i : i + group] for i in range(0, len(finite), group)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Returns the centred running mean over `window` values before and after each value."""
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - window) : i + window + 1])
    ]
