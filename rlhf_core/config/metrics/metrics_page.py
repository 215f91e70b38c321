"""Writes the page of all metrics, docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core.config.metrics.evaluation_metrics import WITHOUT_RATES
from rlhf_core.config.metrics.metric import Metric
from rlhf_core.config.metrics.shared_metrics import ANSWERS, DATA
from rlhf_core.config.metrics.training_metrics import STEPS
from rlhf_core.system.markdown_table import table

HEAD = """# Metrics

Made by `alignflow metrics-docs` from `rlhf_core/config/metrics/`.

This page lists the metrics of a stage's result, which [gates](../how-to/gates.md) may name. `alignflow
validate` refuses a gate on a metric that the stage cannot have. Metrics of optimiser steps are means over
the last tenth of the steps (at least four); `eval/*` are from the last evaluation. PPO's metrics are means
over the last fifth of the logged iterations; its `eval/*` and `selection/*` are from the chosen iteration.
Capitals stand for names in the recipe or the run: MODEL, SOURCE (of rewards), DATA (a source of prompts),
ROLE, JUDGE, ENDPOINT, TASK, REWARD (a reward model), REASON, PHASE, K. A share is between 0 and 1, a
difference between two shares is between -1 and 1.
"""
HEADER = ("metric", "unit", "meaning", "if it is out of bounds")
SHARED = {
    "Stages with data": DATA,
    "Stages with optimiser steps": STEPS,
    "Stages that sample answers": ANSWERS,
    "Stages that compare models": WITHOUT_RATES,
}


def metrics_page(kinds: Mapping[str, Sequence[Metric]]) -> str:
    """Returns the metrics of kinds of stages as Markdown: names, unit, meaning, and what bad values usually
    mean. Metrics that several kinds share are listed once."""
    parts = [HEAD]
    listed: set[Metric] = set()
    for title, shared in SHARED.items():
        names = [f"`{name}`" for name, metrics in kinds.items() if set(shared) <= set(metrics)]
        parts.append(_section(f"{title}\n\nThese are {', '.join(names)}.", shared))
        listed |= set(shared)
    for name, metrics in kinds.items():
        own = tuple(metric for metric in metrics if metric not in listed)
        if own:
            parts.append(_section(f"Stage `{name}`", own))
    return "\n".join(parts).rstrip("\n")


def _section(title: str, metrics: tuple[Metric, ...]) -> str:
    rows = [(_names(metric), metric.unit, _meaning(metric), metric.failed) for metric in metrics]
    return f"## {title}\n\n{table(HEADER, rows)}\n"


def _names(metric: Metric) -> str:
    return ", ".join(f"`{name}`" for name in metric.names.split())


def _meaning(metric: Metric) -> str:
    return metric.meaning if metric.when is None else f"{metric.when.said}: {metric.meaning}"
