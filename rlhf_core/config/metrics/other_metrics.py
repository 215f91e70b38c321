"""Declares metrics of a selection, of the alignment tax and of a publication."""

from __future__ import annotations

from rlhf_core.config.judging.evaluation import AlignmentTax
from rlhf_core.config.judging.lm_eval_tasks import task_name
from rlhf_core.config.metrics.metric import Metric, each
from rlhf_core.config.sweep import Select

Places = list[tuple[str, ...]]

LOSES = "The chosen model loses to the baseline too often: look at the stages that trained it."
TAXED = "Alignment made the model lose abilities: look at its KL to the reference, and at its training data."
SURELY_TAXED = "Alignment certainly made the model lose abilities: look at its KL to the reference first."
SCORES_OTHERWISE = "A model's score on this task is not as expected: compare it with the baseline's score."


def candidates_of(config: Select) -> Places:
    return each(config.of)


def tasks_of(config: AlignmentTax) -> Places:
    return each(task_name(task) for task in config.tasks)


def taxed_of(config: AlignmentTax) -> Places:
    models = dict.fromkeys(model for model in config.models if model != config.baseline)
    return [(task, model) for (task,) in tasks_of(config) for model in models]


def scored_of(config: AlignmentTax) -> Places:
    models = dict.fromkeys([config.baseline, *config.models])
    return [(task, model) for (task,) in tasks_of(config) for model in models]


SELECT = (
    Metric("win_rate", "win rate of the chosen model", "share", failed=LOSES),
    Metric(
        "clear",
        "1 if the intervals of all other models' `difference` are above 0, else 0",
        failed=(
            "This evaluation shows no model to be better than all others: use more questions to narrow the"
            " intervals, or keep the simplest model."
        ),
    ),
    Metric("chosen", "position of the chosen model in `of`, counted from 1"),
    Metric("questions", "questions with a verdict for every model", "count"),
    Metric("win_rate/MODEL", "win rate of a model", "share", of=candidates_of, failed=LOSES),
    Metric(
        "difference/MODEL",
        "the best model's win rate minus this one's, on the same questions",
        "difference",
        of=candidates_of,
    ),
    Metric(
        "difference_low/MODEL difference_high/MODEL",
        "interval of the difference, at 95 % for all pairs of models together (Bonferroni)",
        "difference",
        of=candidates_of,
    ),
)
ALIGNMENT_TAX = (
    Metric("tax/TASK", "largest loss of any model on the task", of=tasks_of, failed=TAXED),
    Metric(
        "tax_low/TASK",
        "largest lower end of any model's interval on the task",
        of=tasks_of,
        failed=SURELY_TAXED,
    ),
    Metric(
        "tax/TASK/MODEL",
        "loss against the baseline in the task's main metric; negative: a gain",
        of=taxed_of,
        failed=TAXED,
    ),
    Metric("tax_low/TASK/MODEL", "lower end of the loss's 95 % interval", of=taxed_of, failed=SURELY_TAXED),
    Metric(
        "tax_high/TASK/MODEL",
        "upper end of the loss's 95 % interval",
        of=taxed_of,
        failed=(
            "It is not certain that the model kept its abilities: use more documents to narrow the interval."
        ),
    ),
    Metric("score/TASK/MODEL", "the task's main metric", of=scored_of, failed=SCORES_OTHERWISE),
    Metric("documents/TASK", "number of documents", "count", of=tasks_of),
)
PUBLICATION = (
    Metric("files", "files of the publication", "count"),
    Metric("bytes", "total size of the files", "bytes"),
)
