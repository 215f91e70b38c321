"""The page's charts of how the training went: a few panels for each stage, drawn from its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.drawing import COLOURS, DASHED, INK, STYLE, WIDTH, short, svg
from evaluation.summary import Curve

MAX_POINTS = 300
ROW = 2.0  # inches: one row of panels


class Panel(NamedTuple):
    """One small chart. `lines`: metric -> label; `band`: the metric drawn as +- around the first line; `level`: a dashed line."""

    title: str
    lines: dict[str, str]
    band: str | None = None
    level: float | None = None


class Run(NamedTuple):
    """The curves of one stage and its label where several are drawn together (rounds)."""

    label: str
    curves: Mapping[str, Curve]


LOSS = Panel("Loss", {"loss": "training", "eval/loss": "held out"})
ACCURACY = Panel("Share of pairs ranked right", {"accuracy": "training", "eval/accuracy": "held out"}, level=0.5)
PANELS: dict[str, tuple[Panel, ...]] = {
    "sft": (LOSS, Panel("Learning rate", {"learning_rate": ""}), Panel("Gradient norm", {"grad_norm": ""})),
    "reward_model": (LOSS, ACCURACY, Panel("Gradient norm", {"grad_norm": ""})),
    "dpo": (
        LOSS,
        ACCURACY,
        Panel("Margin of the implicit reward", {"margin": ""}, level=0.0),
        Panel("Implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}, level=0.0),
    ),
    "kto": (
        LOSS,
        Panel("Share of answers on their label's side of the KL", {"accuracy": "training", "eval/accuracy": "held out"}, level=0.5),
        Panel("Margin to the KL", {"margin": ""}, level=0.0),
        Panel("Implicit rewards", {"rewards/desirable": "desirable", "rewards/undesirable": "undesirable"}, level=0.0),
        Panel("KL to the reference", {"kl": ""}, level=0.0),
    ),
    "ppo": (
        Panel("Reward of the answers (band: ± 1 std)", {"reward/mean": "mean"}, band="reward/std"),
        Panel("KL to the reference", {"kl/mean": ""}, level=0.0),
        Panel("Answer length (tokens)", {"response/length": ""}),
        Panel("Policy ratio", {"policy/ratio": ""}, level=1.0),
        Panel("Share of clipped tokens", {"policy/clip_share": ""}),
        Panel("Share of truncated answers", {"response/truncated": ""}),
        Panel("Value loss", {"value/loss": ""}),
        Panel("Explained variance of the values", {"value/explained_variance": ""}, level=0.0),
        Panel("Log-prob gap, sampler to trainer", {"sampler/gap": ""}),
    ),
}
PHASES = "phase/"


def stage_chart(name: str, kind: str, runs: Sequence[Run]) -> str | None:
    """Small multiples of one stage, or of the rounds of one loop. None when there is nothing to draw."""
    panels = [panel for panel in PANELS.get(kind, ()) if any(_points(run.curves.get(m, [])) for run in runs for m in panel.lines)]
    phases = _phases(runs[0].curves) if len(runs) == 1 else {}
    if not panels and not phases:
        return None
    count = len(panels) + bool(phases)
    columns = 2 if count == 4 else min(3, count)
    rows = math.ceil(count / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, ROW * rows))
        grid = figure.add_gridspec(rows, columns, **_margins(columns, rows))
        for i, panel in enumerate(panels):
            _draw(figure.add_subplot(grid[i // columns, i % columns]), panel, runs)
        if phases:  # last, with the rest of its row
            _stack(figure.add_subplot(grid[len(panels) // columns, len(panels) % columns :]), phases)
        return svg(figure, f"curves of {name}")


def _margins(columns: int, rows: int) -> dict[str, float]:
    """Fixed room for titles and tick labels, as gridspec wants it: matplotlib's own layout engines draw everything twice."""
    left, right, top, bottom, between = 0.45, 0.1, 0.3, 0.3, 0.5  # inches
    panel, high = (WIDTH - left - right - between * (columns - 1)) / columns, (ROW * rows - top - bottom - between * (rows - 1)) / rows
    return {
        "left": left / WIDTH,
        "right": 1 - right / WIDTH,
        "top": 1 - top / (ROW * rows),
        "bottom": bottom / (ROW * rows),
        "wspace": between / panel,
        "hspace": between / high,
    }


def _draw(ax: Axes, panel: Panel, runs: Sequence[Run]) -> None:
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
                low, high = [v - spread.get(s, 0) for s, v in points], [v + spread.get(s, 0) for s, v in points]
                ax.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            dashes = "--" if nth and len(runs) > 1 else "-"
            marker = "o" if len(points) < 8 else None
            window = len(points) // 20
            if window > 1:  # a noisy line stays visible behind its running mean
                ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.7)
                values = tuple(_smooth(values, window))
            ax.plot(steps, values, dashes, color=colour, linewidth=1.5, marker=marker, markersize=3.5, label=short(label) or None)
            labels += bool(label)
    ax.set_title(panel.title)
    ax.margins(x=0.02)
    ax.locator_params(nbins=5)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # the default puts a common factor where the title is
    if labels > 1:
        ax.legend(loc="best", handlelength=1.4)


def _stack(ax: Axes, phases: dict[str, Curve]) -> None:
    steps = sorted({step for curve in phases.values() for step, _ in curve})
    order = sorted(phases, key=lambda phase: -sum(value for _, value in phases[phase]))
    heights = [[dict(phases[phase]).get(step, 0.0) for step in steps] for phase in order]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(order))]
    ax.stackplot(steps, heights, labels=[short(phase.removeprefix(PHASES)) for phase in order], colors=colours, alpha=0.8, linewidth=0)
    ax.set_title("Where an iteration's time goes (s)")
    ax.margins(x=0.005)
    ax.set_ylim(0, 1.35 * max(map(sum, zip(*heights, strict=True)), default=1.0) or 1.0)  # room for the legend
    ax.legend(loc="upper right", ncols=8, handlelength=1, handletextpad=0.4, columnspacing=1.2)


def _phases(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    found = {name: _points(curve) for name, curve in curves.items() if name.startswith(PHASES)}
    return {name: points for name, points in found.items() if points}


def _points(curve: Curve) -> Curve:
    """Finite points, at most MAX_POINTS: neighbours are averaged."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    group = math.ceil(len(finite) / MAX_POINTS)
    if group < 2:
        return finite
    parts = [finite[i : i + group] for i in range(0, len(finite), group)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over `window` values on either side."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window) : i + window + 1])]
