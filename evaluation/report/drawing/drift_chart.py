"""Draws the signals of a drift stage over its successive results as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from evaluation.drift.drift_report import DriftReport, Earlier
from evaluation.report.drawing.chart_style import COLOURS, DASHED, STYLE, WIDTH, short, svg

COLUMNS = 3
RATIOS = ("prompts/length", "answers/length")  # 1 means no drift for these, 0 for the other signals


@matplotlib.rc_context(STYLE)
def drift_chart(report: DriftReport, results: Sequence[Earlier]) -> str:
    """Returns, as SVG, a panel for each signal of `report`, with its value in each of `results`, oldest
    first, and the interval of the newest value."""
    rows = math.ceil(len(report.signals) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.7 * rows), layout="constrained")
    for number, signal in enumerate(report.signals):
        ax = figure.add_subplot(rows, COLUMNS, number + 1)
        points = [
            (nth, one.values[signal.name]) for nth, one in enumerate(results) if signal.name in one.values
        ]
        ax.axhline(1 if signal.name in RATIOS else 0, **DASHED)
        ax.plot(*zip(*points, strict=True), color=COLOURS[0], marker="o", markersize=3, linewidth=1.2)
        ax.vlines(len(results) - 1, signal.low, signal.high, color=COLOURS[0], linewidth=3.5, alpha=0.3)
        ends = sorted({0, len(results) - 1})
        ax.set_xticks(ends, [f"{results[end].at:%Y-%m-%d}" for end in ends])
        ax.margins(x=0.08)
        ax.set_title(short(signal.name))
    return svg(figure, "drift")
