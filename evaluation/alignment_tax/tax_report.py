"""Defines the records of lm-eval's results, and computes each model's loss relative to the baseline on each
task, with confidence intervals. Imports neither torch nor lm-eval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evaluation.scores.scoring import QuestionSums, bootstrap_interval, difference_interval
from rlhf_core.records import Frozen

TAX = "tax.json"
Z95 = 1.959964


class Score(Frozen):
    """One metric of one task. `documents` maps each document to its value if `value` is the mean of these;
    otherwise it is None."""

    value: float
    stderr: float | None
    higher_is_better: bool
    documents: dict[str, float] | None


class TaskScores(Frozen):
    """The scores of a task or group. `metrics`: keyed by `metric,filter`, in lm-eval's order (the first is
    the main one); `documents`: the number of documents."""

    metrics: dict[str, Score]
    documents: int


class ModelScores(Frozen):
    """The scores of one model on all tasks, keyed by the recipe's name for the task. `identity`: a digest of
    the model's files (see `served_models.identity_of`)."""

    model: str
    identity: str
    tasks: dict[str, TaskScores]
    lm_eval: str


class ScoreDrop(Frozen):
    """The loss of a model on one metric. `tax`: baseline minus model, or model minus baseline if lower is
    better. `paired`: whether the 95 % interval is over the documents that both models answered. Otherwise the
    interval combines the two standard errors, taken as independent, or is None if lm-eval reported no
    standard errors."""

    tax: float
    ci_low: float | None
    ci_high: float | None
    paired: bool


class TaxRow(ScoreDrop):
    """One metric of one task for a model and the baseline. `main`: whether this is the task's first metric,
    which gates and the chart use."""

    task: str
    metric: str
    model: str
    main: bool
    value: float
    stderr: float | None
    baseline_value: float
    baseline_stderr: float | None
    documents: int


class TaxReport(Frozen):
    """The contents of `tax.json`."""

    baseline: str
    models: tuple[str, ...]
    tasks: tuple[str, ...]
    lm_eval: str
    chat_template: bool
    num_fewshot: int | None
    rows: tuple[TaxRow, ...]

    @property
    def main(self) -> tuple[TaxRow, ...]:
        """Returns the rows of the tasks' main metrics."""
        return tuple(row for row in self.rows if row.main)


def compare(baseline: ModelScores, model: ModelScores, resamples: int, seed: int) -> list[TaxRow]:
    """Returns a row for each metric that both models report. `resamples` and `seed` configure the
    bootstrap."""
    rows = []
    for task, scores in model.tasks.items():
        before = baseline.tasks[task]
        shared = [metric for metric in scores.metrics if metric in before.metrics]
        for metric in shared:
            one = before.metrics[metric]
            other = scores.metrics[metric]
            rows.append(
                TaxRow(
                    task=task,
                    metric=metric.removesuffix(",none"),
                    model=model.model,
                    main=metric == shared[0],
                    value=other.value,
                    stderr=other.stderr,
                    baseline_value=one.value,
                    baseline_stderr=one.stderr,
                    documents=scores.documents,
                    **loss_of(one, other, resamples, seed).model_dump(),
                )
            )
    return rows


def loss_of(baseline: Score, model: Score, resamples: int, seed: int) -> ScoreDrop:
    """Returns baseline minus model (model minus baseline if lower is better), with a 95 % interval.

    The interval is a `difference_interval` if the documents' scores are from 0 to 1, and a bootstrap interval
    otherwise (losses). There is no bootstrap interval if all differences are equal.
    """
    sign = 1.0 if model.higher_is_better else -1.0
    lost = sign * (baseline.value - model.value)
    own = baseline.documents
    other = model.documents
    if own is not None and other is not None and own.keys() == other.keys():
        before, after = (np.array([values[name] for name in sorted(own)]) for values in (own, other))
        differences = sign * (before - after)
        scores = min(before.min(), after.min()) >= 0 and max(before.max(), after.max()) <= 1
        if model.higher_is_better and scores:
            low, high = difference_interval(differences)
        elif (differences == differences[0]).all():
            return ScoreDrop(tax=lost, ci_low=None, ci_high=None, paired=True)
        else:
            low, high = bootstrap_interval(
                QuestionSums(differences, np.ones(len(differences))), resamples, seed
            )
        return ScoreDrop(tax=lost, ci_low=low, ci_high=high, paired=True)
    if baseline.stderr is None or model.stderr is None:
        return ScoreDrop(tax=lost, ci_low=None, ci_high=None, paired=False)
    half = Z95 * math.hypot(baseline.stderr, model.stderr)
    return ScoreDrop(tax=lost, ci_low=lost - half, ci_high=lost + half, paired=False)


def tax_metrics(report: TaxReport) -> dict[str, float]:
    """Returns `tax/<task>/<model>` with its interval, `score/<task>/<model>`, and the maxima over models
    `tax/<task>` and `tax_low/<task>`."""
    found: dict[str, float] = {}
    for row in report.main:
        about = {"tax": row.tax, "tax_low": row.ci_low, "tax_high": row.ci_high, "score": row.value}
        found |= {
            f"{name}/{row.task}/{row.model}": value for name, value in about.items() if value is not None
        }
        found |= {
            f"score/{row.task}/{report.baseline}": row.baseline_value,
            f"documents/{row.task}": float(row.documents),
        }
    for task in report.tasks:
        for name in ("tax", "tax_low"):
            values = [
                found[f"{name}/{task}/{model}"]
                for model in report.models
                if f"{name}/{task}/{model}" in found
            ]
            if values:
                found[f"{name}/{task}"] = float(np.max(values))
    return found


def log_lines(report: TaxReport) -> Sequence[str]:
    """Returns one log line for each task and model."""
    lines = []
    for row in report.main:
        bounds = "" if row.ci_low is None else f" [{row.ci_low:+.3f}, {row.ci_high:+.3f}]"
        scores = f"{row.metric} {row.baseline_value:.3f} -> {row.value:.3f}"
        lines.append(
            f"{row.model} against {report.baseline} on {row.task}: {scores}, lost {row.tax:+.3f}{bounds}"
        )
    return lines
