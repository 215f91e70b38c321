"""The page's charts: matplotlib figures as inline SVG text.

Each function returns one `<svg>` element without a size of its own (the page's CSS gives the width), with text kept as text and ids salted
by the chart's name, so that many of them can stand in one HTML file. No pyplot: no global state, any thread may draw.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.over_optimisation import OverOptimisation
from evaluation.summary import Curve
from rlhf_core.types import WinRate

COLOURS = ("#2563a8", "#d9822b", "#2e8b6f", "#a8437a", "#6f5bb0", "#7a8794", "#b8a11f", "#3aa0b8")
INK, RED = "#3c4650", "#c0392b"
MAX_POINTS = 300
WIDTH, ROW = 10.95, 2.0  # inches: a stage's figure, and one row of its panels
STYLE: dict[Any, Any] = {  # matplotlib types its keys as one long Literal
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": "#b9c2cb",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#edf0f3",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


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
        return _svg(figure, f"curves of {name}")


class Mark(NamedTuple):
    """A win rate of the chart: who plays whom and how it is counted (`label`), its colour, filled (raw) or hollow (controlled)."""

    label: str
    colour: str
    filled: bool
    value: float
    low: float
    high: float


def win_rate_chart(rates: Sequence[WinRate], final: str, parents: Mapping[str, WinRate] | None = None) -> str:
    """Win rates of every model with their 95 % intervals; the dashed line is an even match.

    Against the baseline and, where `parents` has it, against the model it was trained from; raw (filled) and length-controlled (hollow).
    """
    rows = {rate.model: _marks(rate, (parents or {}).get(rate.model)) for rate in rates}
    marks = [mark for row in rows.values() for mark in row]
    count = max(map(len, rows.values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, max(2.4, 0.95 + (0.28 + 0.16 * count) * len(rates))), layout="constrained")
        ax = figure.add_subplot()
        ax.axvline(50, color="#8a949e", linewidth=0.9, linestyle=(0, (4, 3)))
        told: set[str] = set()
        for row, model in enumerate(reversed(rows)):
            for nth, mark in enumerate(rows[model]):
                at = row + 0.68 * ((len(rows[model]) - 1) / 2 - nth) / max(1, count)
                alpha = 1.0 if model == final or len(rows) == 1 else 0.6
                ax.hlines(at, 100 * mark.low, 100 * mark.high, color=mark.colour, linewidth=3.5, alpha=0.3 * alpha)
                face = mark.colour if mark.filled else "white"
                label = None if mark.label in told else mark.label
                ax.plot([100 * mark.value], [at], "o", color=mark.colour, markerfacecolor=face, markersize=5, alpha=alpha, label=label)
                told.add(mark.label)
                ax.annotate(f"{100 * mark.value:.0f} %", (100 * mark.high, at), (6, 0), textcoords="offset points", va="center", fontsize=7)
        ax.set_yticks(range(len(rows)), [_short(model) for model in reversed(rows)])
        ax.set_ylim(-0.6, len(rows) - 0.4)
        ax.set_xlim(max(0, 100 * min(0.5, *(mark.low for mark in marks)) - 4), min(106, 100 * max(0.5, *(mark.high for mark in marks)) + 9))
        ax.grid(axis="y", visible=False)
        ax.set_title(f"Battles won against {rates[0].baseline} (%)" if len(told) == 1 else "Battles won (%)")
        if len(told) > 1:
            figure.legend(loc="outside lower center", ncols=2, handlelength=1, columnspacing=1.4)
        return _svg(figure, "win rates")


def _marks(rate: WinRate, parent: WinRate | None) -> list[Mark]:
    marks = []
    for played, colour, name in ((rate, COLOURS[0], rate.baseline), (parent, COLOURS[1], "its parent")):
        if played is None:
            continue
        marks.append(Mark(f"against {name}", colour, True, played.win_rate, played.ci_low, played.ci_high))
        if played.length_controlled is not None and played.lc_low is not None and played.lc_high is not None:
            held = played.length_controlled, played.lc_low, played.lc_high
            marks.append(Mark(f"against {name}, length-controlled", colour, False, *held))
    return marks


def calibration_chart(models: Mapping[str, Sequence[tuple[float, float, int]]]) -> str:
    """Reward models' calibration: points (predicted probability, share that was right, pairs); the dashed line is a calibrated model."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.2), layout="constrained")
        ax = figure.add_subplot()
        ax.plot([50, 100], [50, 100], color="#8a949e", linewidth=0.9, linestyle=(0, (4, 3)))
        for colour, (model, points) in zip(COLOURS * len(models), models.items(), strict=False):
            most = max(pairs for *_, pairs in points)
            ax.plot([100 * p for p, *_ in points], [100 * a for _, a, _ in points], color=colour, linewidth=1.2, label=_short(model))
            sizes = [8 + 50 * pairs / most for *_, pairs in points]
            ax.scatter([100 * p for p, *_ in points], [100 * a for _, a, _ in points], s=sizes, color=colour, alpha=0.6)
        ax.set_title("Reward models: right (%) by how sure they were (%)")
        ax.legend(loc="best", handlelength=1.4)
        return _svg(figure, "calibration of reward models")


class Lost(NamedTuple):
    """What a model lost on a task, with its 95 % interval where there is one."""

    task: str
    model: str
    value: float
    low: float | None
    high: float | None


def tax_chart(losses: Sequence[Lost], baseline: str, unit: str) -> str:
    """Losses against the baseline by task, a colour for each model; right of the dashed line something was lost."""
    tasks, models = list(dict.fromkeys(loss.task for loss in losses)), list(dict.fromkeys(loss.model for loss in losses))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, max(2.0, 0.95 + (0.2 + 0.16 * len(models)) * len(tasks))), layout="constrained")
        ax = figure.add_subplot()
        ax.axvline(0, color="#8a949e", linewidth=0.9, linestyle=(0, (4, 3)))
        for nth, model in enumerate(models):
            colour = COLOURS[nth % len(COLOURS)]
            rows = [(len(tasks) - 1 - tasks.index(loss.task), loss) for loss in losses if loss.model == model]
            at = [row + 0.6 * ((len(models) - 1) / 2 - nth) / len(models) for row, _ in rows]
            for height, (_, loss) in zip(at, rows, strict=True):
                if loss.low is not None and loss.high is not None:
                    ax.hlines(height, loss.low, loss.high, color=colour, linewidth=3.5, alpha=0.3)
            ax.plot([loss.value for _, loss in rows], at, "o", color=colour, markersize=5, label=_short(model))
        ax.set_yticks(range(len(tasks)), [_short(task) for task in reversed(tasks)])
        ax.set_ylim(-0.6, len(tasks) - 0.4)
        ax.margins(x=0.08)
        ax.grid(axis="y", visible=False)
        ax.set_title(f"Lost against {_short(baseline)} ({unit})")
        if len(models) > 1:
            figure.legend(loc="outside lower center", ncols=3, handlelength=1, columnspacing=1.4)
        return _svg(figure, "alignment tax")


def over_optimisation_chart(found: OverOptimisation) -> str:
    """Proxy reward and win rate over the square root of the KL from the baseline, as Gao et al. (2022) draw them. A ring marks points that
    the proxy likes more and the judge less than an earlier one of their chain; a thick one: surely."""
    start, *points = found.points
    chains = {name: [start, *(p for p in points if p.chain == name)] for name in dict.fromkeys(point.chain for point in points)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        right.axhline(50, color="#8a949e", linewidth=0.9, linestyle=(0, (4, 3)))
        for colour, (name, chain) in zip(COLOURS * len(chains), chains.items(), strict=False):
            chain = sorted(chain, key=lambda point: point.kl)
            x = [math.sqrt(max(point.kl, 0.0)) for point in chain]  # an estimate of a KL near zero may be negative
            won = [(100 * p.ci_low, 100 * p.win_rate, 100 * p.ci_high) for p in chain]
            liked = [(p.proxy - 1.96 * p.proxy_error, p.proxy, p.proxy + 1.96 * p.proxy_error) for p in chain]
            for ax, bands in ((left, liked), (right, won)):
                low, middle, high = zip(*bands, strict=True)
                ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
                ax.plot(x, middle, "o-", color=colour, markersize=4, linewidth=1.4, label=_short(name))
                rings = [(at, y, p.suspicion == "sure") for at, y, p in zip(x, middle, chain, strict=True) if p.suspicion != "none"]
                for at, y, sure in rings:
                    ax.plot(
                        [at], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=1.8 if sure else 0.8
                    )
        left.set_title(f"What was climbed: mean score of {_short(found.proxy)}")
        right.set_title(f"What was wanted: battles won against {_short(found.baseline)} (%)")
        for ax in (left, right):
            ax.set_xlabel(f"square root of the KL from {_short(found.baseline)} (nats an answer)", fontsize=7.5)
        if len(chains) > 1:
            right.legend(loc="best", handlelength=1.4)
        return _svg(figure, "over-optimisation")


def rounds_chart(chains: Sequence[Sequence[tuple[str, float, float, float]]], training: str) -> str:
    """Win rate round by round of iterative `training`. Each chain is a list of (label, win rate, ci_low, ci_high)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 2.4), layout="constrained")
        ax = figure.add_subplot()
        ax.axhline(50, color="#8a949e", linewidth=0.9, linestyle=(0, (4, 3)))
        for colour, chain in zip(COLOURS * len(chains), chains, strict=False):
            at = list(range(len(chain)))
            ax.fill_between(at, [100 * p[2] for p in chain], [100 * p[3] for p in chain], color=colour, alpha=0.15, linewidth=0)
            ax.plot(at, [100 * p[1] for p in chain], "o-", color=colour, markersize=5)
        longest = max(chains, key=len)
        ax.set_xticks(range(len(longest)), [_short(point[0]) for point in longest])
        ax.margins(x=0.08)
        ax.set_title(f"Battles won, round by round of iterative {training} (%)")
        return _svg(figure, "win rate per round")


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
        ax.axhline(panel.level, color="#8a949e", linewidth=0.8, linestyle=(0, (4, 3)))
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
            ax.plot(steps, values, dashes, color=colour, linewidth=1.5, marker=marker, markersize=3.5, label=_short(label) or None)
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
    ax.stackplot(steps, heights, labels=[_short(phase.removeprefix(PHASES)) for phase in order], colors=colours, alpha=0.8, linewidth=0)
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


def _short(label: str, limit: int = 28) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"


def _svg(figure: Figure, name: str) -> str:
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"alignflow {name}"}):
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same in every chart, and nothing refers to them
    text = re.sub(r"font: ([^;\"']*?px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)
