"""The page's charts that compare models: win rates, over-optimisation, reward models' calibration, what alignment cost, rounds of loops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from evaluation.drawing import COLOURS, DASHED, RED, STYLE, WIDTH, short, svg
from evaluation.over_optimisation import OverOptimisation
from rlhf_core.types import WinRate


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
        ax.axvline(50, **DASHED)
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
        ax.set_yticks(range(len(rows)), [short(model) for model in reversed(rows)])
        ax.set_ylim(-0.6, len(rows) - 0.4)
        ax.set_xlim(max(0, 100 * min(0.5, *(mark.low for mark in marks)) - 4), min(106, 100 * max(0.5, *(mark.high for mark in marks)) + 9))
        ax.grid(axis="y", visible=False)
        ax.set_title(f"Battles won against {rates[0].baseline} (%)" if len(told) == 1 else "Battles won (%)")
        if len(told) > 1:
            figure.legend(loc="outside lower center", ncols=2, handlelength=1, columnspacing=1.4)
        return svg(figure, "win rates")


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
        ax.plot([50, 100], [50, 100], **DASHED)
        for colour, (model, points) in zip(COLOURS * len(models), models.items(), strict=False):
            most = max(pairs for *_, pairs in points)
            ax.plot([100 * p for p, *_ in points], [100 * a for _, a, _ in points], color=colour, linewidth=1.2, label=short(model))
            sizes = [8 + 50 * pairs / most for *_, pairs in points]
            ax.scatter([100 * p for p, *_ in points], [100 * a for _, a, _ in points], s=sizes, color=colour, alpha=0.6)
        ax.set_title("Reward models: right (%) by how sure they were (%)")
        ax.legend(loc="best", handlelength=1.4)
        return svg(figure, "calibration of reward models")


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
        ax.axvline(0, **DASHED)
        for nth, model in enumerate(models):
            colour = COLOURS[nth % len(COLOURS)]
            rows = [(len(tasks) - 1 - tasks.index(loss.task), loss) for loss in losses if loss.model == model]
            at = [row + 0.6 * ((len(models) - 1) / 2 - nth) / len(models) for row, _ in rows]
            for height, (_, loss) in zip(at, rows, strict=True):
                if loss.low is not None and loss.high is not None:
                    ax.hlines(height, loss.low, loss.high, color=colour, linewidth=3.5, alpha=0.3)
            ax.plot([loss.value for _, loss in rows], at, "o", color=colour, markersize=5, label=short(model))
        ax.set_yticks(range(len(tasks)), [short(task) for task in reversed(tasks)])
        ax.set_ylim(-0.6, len(tasks) - 0.4)
        ax.margins(x=0.08)
        ax.grid(axis="y", visible=False)
        ax.set_title(f"Lost against {short(baseline)} ({unit})")
        if len(models) > 1:
            figure.legend(loc="outside lower center", ncols=3, handlelength=1, columnspacing=1.4)
        return svg(figure, "alignment tax")


def over_optimisation_chart(found: OverOptimisation) -> str:
    """Proxy reward and win rate over the square root of the KL from the baseline, as Gao et al. (2022) draw them. A ring marks points that
    the proxy likes more and the judge less than an earlier one of their chain; a thick one: surely."""
    start, *points = found.points
    chains = {name: [start, *(p for p in points if p.chain == name)] for name in dict.fromkeys(point.chain for point in points)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        right.axhline(50, **DASHED)
        for colour, (name, chain) in zip(COLOURS * len(chains), chains.items(), strict=False):
            chain = sorted(chain, key=lambda point: point.kl)
            x = [math.sqrt(max(point.kl, 0.0)) for point in chain]  # an estimate of a KL near zero may be negative
            won = [(100 * p.ci_low, 100 * p.win_rate, 100 * p.ci_high) for p in chain]
            liked = [(p.proxy - 1.96 * p.proxy_error, p.proxy, p.proxy + 1.96 * p.proxy_error) for p in chain]
            for ax, bands in ((left, liked), (right, won)):
                low, middle, high = zip(*bands, strict=True)
                ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
                ax.plot(x, middle, "o-", color=colour, markersize=4, linewidth=1.4, label=short(name))
                rings = [(at, y, p.suspicion == "sure") for at, y, p in zip(x, middle, chain, strict=True) if p.suspicion != "none"]
                for at, y, sure in rings:
                    ax.plot(
                        [at], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=1.8 if sure else 0.8
                    )
        left.set_title(f"What was climbed: mean score of {short(found.proxy)}")
        right.set_title(f"What was wanted: battles won against {short(found.baseline)} (%)")
        for ax in (left, right):
            ax.set_xlabel(f"square root of the KL from {short(found.baseline)} (nats an answer)", fontsize=7.5)
        if len(chains) > 1:
            right.legend(loc="best", handlelength=1.4)
        return svg(figure, "over-optimisation")


def rounds_chart(chains: Sequence[Sequence[tuple[str, float, float, float]]], training: str) -> str:
    """Win rate round by round of iterative `training`. Each chain is a list of (label, win rate, ci_low, ci_high)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 2.4), layout="constrained")
        ax = figure.add_subplot()
        ax.axhline(50, **DASHED)
        for colour, chain in zip(COLOURS * len(chains), chains, strict=False):
            at = list(range(len(chain)))
            ax.fill_between(at, [100 * p[2] for p in chain], [100 * p[3] for p in chain], color=colour, alpha=0.15, linewidth=0)
            ax.plot(at, [100 * p[1] for p in chain], "o-", color=colour, markersize=5)
        longest = max(chains, key=len)
        ax.set_xticks(range(len(longest)), [short(point[0]) for point in longest])
        ax.margins(x=0.08)
        ax.set_title(f"Battles won, round by round of iterative {training} (%)")
        return svg(figure, "win rate per round")
