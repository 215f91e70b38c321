"""Metrics of rewarded answers, and of a preferences stage (a round of a loop)."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each
from rlhf_core.config.metrics.shared import ANSWERS, DATA

MAKES_PAIRS = Condition("with `post_processor: dpo`", lambda config: config.post_processor == "dpo")
MAKES_ANSWERS = Condition("with other post-processors", lambda config: config.post_processor != "dpo")
REWARDED_OTHERWISE = (
    "The sampled answers are rewarded otherwise than expected: the policy or the reward model before this"
    " stage is bad."
)


def sources_of(config: Any) -> list[tuple[str, ...]]:
    return each(source.title for source in config.reward)


def rewarded(failed: str) -> tuple[Metric, ...]:
    """Returns the metrics of the rewards of a stage's answers."""
    return (
        Metric("reward/mean reward/std", "of the weighted sum, before any standardisation", failed=failed),
        Metric("reward/SOURCE/mean reward/SOURCE/std", "of one source", of=sources_of, failed=failed),
        Metric(
            "reward/SOURCE/failed",
            "answers to which one source gave no reward",
            "count",
            of=sources_of,
            failed=failed,
        ),
    )


PREFERENCES = (
    Metric("prompts", "prompts that were sampled", "count"),
    Metric(
        "pairs",
        "pairs written",
        "count",
        MAKES_PAIRS,
        failed="Sampling gave too few pairs: all answers to a prompt score the same; raise temperature or"
        " n_samples_per_prompt.",
    ),
    Metric(
        "answers",
        "answers written",
        "count",
        MAKES_ANSWERS,
        failed="Sampling gave too few answers to train on: lower min_reward, or raise generate_max_len.",
    ),
    Metric(
        "dropped/REASON",
        "prompts without a row, by reason",
        "count",
        of=after_run,
        failed="Many prompts gave no training row: raise temperature, n_samples_per_prompt or"
        " generate_max_len.",
    ),
    *rewarded(REWARDED_OTHERWISE),
    Metric(
        "reward/best reward/worst",
        "mean over prompts of the best and of the worst answer",
        failed=REWARDED_OTHERWISE,
    ),
    Metric("reward/failed", "answers without a reward", "count", failed=REWARDED_OTHERWISE),
    *ANSWERS,
    *DATA,
)
