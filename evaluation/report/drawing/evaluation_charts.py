"""Draws the charts of evaluations: win rates, reward models' calibration, alignment tax, over-optimisation
and rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from evaluation.alignment_tax.tax_report import TaxReport
from evaluation.report.drawing.chart_style import COLOURS, DASHED, RED, STYLE, WIDTH, short, svg
from evaluation.report.drawing.charts import X_LABEL
from evaluation.scores.over_optimisation import OverOptimisation
from evaluation.scores.reward_accuracy import RewardReports
from rlhf_core.records import WinRate


class WinRateMark(NamedTuple):
    """A win rate in the chart. `label`: opponent and kind of rate; `filled`: whether the rate is raw rather
    than length-controlled."""

    label: str
    colour: str
    filled: bool
    value: float
    low: float
    high: float


@matplotlib.rc_context(STYLE)
def win_rate_chart(rates: Sequence[WinRate], final: str, parents: Mapping[str, WinRate] | None = None) -> str:
    """Returns a chart of every model's win rates with their 95 % intervals, as SVG. The dashed line is 50 %.

    Rates are against the baseline and, for models in `parents`, also against the model's parent. Filled marks
    are raw rates; hollow marks are length-controlled rates.
    """
    rows = {rate.model: _marks(rate, (parents or {}).get(rate.model)) for rate in rates}
    marks = [mark for row in rows.values() for mark in row]
    count = max(map(len, rows.values()))
    figure = Figure(figsize=(5.5, max(2.4, 0.95 + (0.28 + 0.16 * count) * len(rates))), layout="constrained")
    ax = figure.add_subplot()
    ax.axvline(50, **DASHED)
    labelled: set[str] = set()
    for row, model in enumerate(reversed(rows)):
        for nth, mark in enumerate(rows[model]):
            at = row + 0.68 * ((len(rows[model]) - 1) / 2 - nth) / max(1, count)
            alpha = 1.0 if model == final or len(rows) == 1 else 0.6
            ax.hlines(
                at, 100 * mark.low, 100 * mark.high, color=mark.colour, linewidth=3.5, alpha=0.3 * alpha
            )
            face = mark.colour if mark.filled else "white"
            label = None if mark.label in labelled else mark.label
            ax.plot(
                [100 * mark.value],
                [at],
                "o",
                color=mark.colour,
                markerfacecolor=face,
                markersize=5,
                alpha=alpha,
                label=label,
            )
            labelled.add(mark.label)
            ax.annotate(
                f"{100 * mark.value:.0f} %",
                (100 * mark.high, at),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
    ax.set_yticks(range(len(rows)), [short(model) for model in reversed(rows)])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlim(
        max(0, 100 * min(0.5, *(mark.low for mark in marks)) - 4),
        min(106, 100 * max(0.5, *(mark.high for mark in marks)) + 9),
    )
    ax.grid(axis="y", visible=False)
    against = f" against {rates[0].baseline}" if len(labelled) == 1 else ""
    ax.set_title(f"Win rate{against} (%)")
    ax.set_xlabel("win rate (%)", **X_LABEL)
    if len(labelled) > 1:
        figure.legend(loc="outside lower center", ncols=2, handlelength=1, columnspacing=1.4)
    return svg(figure, "win rates")


def _marks(rate: WinRate, parent: WinRate | None) -> list[WinRateMark]:
    marks = []
    for played, colour, name in ((rate, COLOURS[0], rate.baseline), (parent, COLOURS[1], "its parent")):
        if played is None:
            continue
        marks.append(
            WinRateMark(f"against {name}", colour, True, played.win_rate, played.ci_low, played.ci_high)
        )
        if played.length_controlled is not None and played.lc_low is not None and played.lc_high is not None:
            held = played.length_controlled, played.lc_low, played.lc_high
            marks.append(WinRateMark(f"against {name}, length-controlled", colour, False, *held))
    return marks


@matplotlib.rc_context(STYLE)
def calibration_chart(reports: RewardReports) -> str:
    """Returns a chart of reward models' calibration, as SVG. The dashed line marks perfect calibration;
    larger points stand for more pairs."""
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    ax = figure.add_subplot()
    ax.plot([50, 100], [50, 100], **DASHED)
    for colour, report in zip(COLOURS * len(reports.models), reports.models, strict=False):
        sure = [100 * part.confidence for part in report.calibration]
        right = [100 * part.accuracy for part in report.calibration]
        most = max(part.pairs for part in report.calibration)
        ax.plot(sure, right, color=colour, linewidth=1.2, label=short(report.model))
        ax.scatter(
            sure,
            right,
            s=[8 + 50 * part.pairs / most for part in report.calibration],
            color=colour,
            alpha=0.6,
        )
    ax.set_title("Reward models: accuracy (%) by confidence (%)")
    ax.set_xlabel("confidence: mean probability of the preferred answer (%)", **X_LABEL)
    ax.legend(loc="best", handlelength=1.4)
    return svg(figure, "calibration of reward models")


@matplotlib.rc_context(STYLE)
def tax_chart(report: TaxReport) -> str:
    """Returns a chart of losses relative to the baseline by task, as SVG, with a colour for each model. A
    model is worse than the baseline to the right of the dashed line."""
    tasks = list(dict.fromkeys(row.task for row in report.main))
    models = list(dict.fromkeys(row.model for row in report.main))
    shares = all(0 <= value <= 1 for row in report.main for value in (row.value, row.baseline_value))
    scale, unit = (100, "percentage points") if shares else (1, "in the metric's own unit")
    figure = Figure(
        figsize=(5.5, max(2.0, 0.95 + (0.2 + 0.16 * len(models)) * len(tasks))), layout="constrained"
    )
    ax = figure.add_subplot()
    ax.axvline(0, **DASHED)
    for nth, model in enumerate(models):
        colour = COLOURS[nth % len(COLOURS)]
        rows = [row for row in report.main if row.model == model]
        at = [
            len(tasks) - 1 - tasks.index(row.task) + 0.6 * ((len(models) - 1) / 2 - nth) / len(models)
            for row in rows
        ]
        for height, row in zip(at, rows, strict=True):
            if row.ci_low is not None and row.ci_high is not None:
                ax.hlines(
                    height, scale * row.ci_low, scale * row.ci_high, color=colour, linewidth=3.5, alpha=0.3
                )
        ax.plot([scale * row.tax for row in rows], at, "o", color=colour, markersize=5, label=short(model))
    ax.set_yticks(range(len(tasks)), [short(task) for task in reversed(tasks)])
    ax.set_ylim(-0.6, len(tasks) - 0.4)
    ax.margins(x=0.08)
    ax.grid(axis="y", visible=False)
    ax.set_title(f"Lost against {short(report.baseline)} ({unit})")
    ax.set_xlabel(unit, **X_LABEL)
    if len(models) > 1:
        figure.legend(loc="outside lower center", ncols=3, handlelength=1, columnspacing=1.4)
    return svg(figure, "alignment tax")


@matplotlib.rc_context(STYLE)
def over_optimisation_chart(found: OverOptimisation) -> str:
    """Returns a chart of proxy reward and win rate over the square root of the KL from the baseline, as SVG,
    following Gao et al. (2022). A ring marks points whose `suspicion` is `possible`, and a thick ring marks
    points whose `suspicion` is `sure`; see `over_optimisation.Point`."""
    start, *points = found.points
    chains = {
        name: [start, *(p for p in points if p.chain == name)]
        for name in dict.fromkeys(point.chain for point in points)
    }
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    right.axhline(50, **DASHED)
    for colour, (name, chain) in zip(COLOURS * len(chains), chains.items(), strict=False):
        chain = sorted(chain, key=lambda point: point.kl)
        # the estimate of a KL near zero may be negative
        x = [math.sqrt(max(point.kl, 0.0)) for point in chain]
        won = [(100 * p.ci_low, 100 * p.win_rate, 100 * p.ci_high) for p in chain]
        liked = [(p.proxy - 1.96 * p.proxy_error, p.proxy, p.proxy + 1.96 * p.proxy_error) for p in chain]
        for ax, bands in ((left, liked), (right, won)):
            low, middle, high = zip(*bands, strict=True)
            ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(x, middle, "o-", color=colour, markersize=4, linewidth=1.4, label=short(name))
            rings = [
                (at, y, p.suspicion == "sure")
                for at, y, p in zip(x, middle, chain, strict=True)
                if p.suspicion != "none"
            ]
            for at, y, sure in rings:
                ax.plot(
                    [at],
                    [y],
                    "o",
                    markersize=11,
                    markerfacecolor="none",
                    markeredgecolor=RED,
                    markeredgewidth=1.8 if sure else 0.8,
                )
    left.set_title(f"Trained on: mean score of {short(found.proxy)}")
    right.set_title(f"Goal: win rate against {short(found.baseline)} (%)")
    for ax in (left, right):
        ax.set_xlabel(f"square root of the KL to {short(found.baseline)} (nats per answer)", **X_LABEL)
    if len(chains) > 1:
        right.legend(loc="best", handlelength=1.4)
    return svg(figure, "over-optimisation")


@matplotlib.rc_context(STYLE)
def rounds_chart(chains: Sequence[Sequence[tuple[str, float, float, float]]], training: str) -> str:
    """Returns a chart of the win rate of each round of iterative `training`, as SVG. Each chain is a list of
    (label, win rate, ci_low, ci_high)."""
    figure = Figure(figsize=(5.5, 2.4), layout="constrained")
    ax = figure.add_subplot()
    ax.axhline(50, **DASHED)
    for colour, chain in zip(COLOURS * len(chains), chains, strict=False):
        at = list(range(len(chain)))
        ax.fill_between(
            at,
            [100 * p[2] for p in chain],
            [100 * p[3] for p in chain],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        ax.plot(at, [100 * p[1] for p in chain], "o-", color=colour, markersize=5)
    longest = max(chains, key=len)
    ax.set_xticks(range(len(longest)), [short(point[0]) for point in longest])
    ax.margins(x=0.08)
    ax.set_title(f"Win rate, round by round of iterative {training} (%)")
    ax.set_xlabel("model after each round", **X_LABEL)
    return svg(figure, "win rate per round")
