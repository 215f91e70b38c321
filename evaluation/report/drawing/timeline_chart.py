"""Draws one PPO iteration as a timeline with a row for the stage and for each role, and a bar for each phase
of work."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.report.drawing.chart_style import COLOURS, INK, STYLE, WIDTH, short, svg
from rlhf_core.runs.timeline import Timeline, TimelineRow

ROW = 0.26  # inches
NAMED = 0.07  # bars show their phase's name from this share of the iteration on
LEFT = 1.9  # inches for row names


@matplotlib.rc_context(STYLE)
def timeline_chart(name: str, timeline: Timeline) -> str:
    """Returns the timeline as an `<svg>` element. `name`: the stage's name."""
    count = len(timeline.rows)
    height = ROW * count + 0.55
    figure = Figure(figsize=(WIDTH, height))
    ax = figure.add_axes((LEFT / WIDTH, 0.42 / height, 1 - (LEFT + 0.15) / WIDTH, ROW * count / height))
    phases = dict.fromkeys(phase for row in timeline.rows for phase, _, _ in row.spans)
    colours = {phase: COLOURS[i % len(COLOURS)] for i, phase in enumerate(phases)}
    for place, row in enumerate(timeline.rows):
        _draw(ax, place, row, colours, timeline.seconds)
    ax.set_yticks(range(count), [short(label_of(row)) for row in timeline.rows])
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_xlim(0, timeline.seconds)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("seconds since the iteration began", fontsize=7.5, labelpad=1.5)
    return svg(figure, f"timeline of an iteration of {name}")


def label_of(row: TimelineRow) -> str:
    """Returns the name of a row and its GPUs."""
    if not row.gpus:
        return row.name
    numbers = ", ".join(map(str, row.gpus))
    return f"{row.name} · GPU {numbers}"


def _draw(ax: Axes, place: int, row: TimelineRow, colours: dict[str, str], seconds: float) -> None:
    for phase, begin, end in row.spans:
        ax.barh(place, end - begin, left=begin, height=0.72, color=colours[phase], linewidth=0)
        if end - begin > NAMED * seconds:
            middle = (begin + end) / 2
            ax.text(middle, place, phase, ha="center", va="center", fontsize=7, color="white")
        elif end - begin > NAMED / 4 * seconds:
            ax.text(end, place, f" {phase}", ha="left", va="center", fontsize=6.5, color=INK)
