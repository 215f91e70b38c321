"""Declares metrics of rewarded answers, and of a preferences stage (a round of a loop)."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each
from rlhf_core.config.metrics.shared_metrics import ANSWERS, DATA
from rlhf_core.config.rewarding.judge_models import RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import ReasoningGymReward

MAKES_PAIRS = Condition("with `post_processor: dpo`", lambda config: config.post_processor == "dpo")
MAKES_ANSWERS = Condition("unless `post_processor: dpo`", lambda config: config.post_processor != "dpo")
NO_REWARDS = "A reward source gave no reward to many answers: look at its errors."
OTHER_TASTE = "The judge's preferences differ from the labels: change its rubric, or use another judge."
REWARDED_OTHERWISE = (
    "The rewards of the sampled answers are not as expected: the policy or reward model from an earlier stage"
    " is bad."
)


def sources_of(config: Any) -> list[tuple[str, ...]]:
    return each(source.title for source in config.reward)


def tasks_of(config: Any) -> list[tuple[str, ...]]:
    scored = any(isinstance(source, ReasoningGymReward) for source in config.reward)
    return each(config.prompts.tasks) if scored else []


def judges_of(config: Any) -> list[tuple[str, ...]]:
    return each(source.title for source in config.reward if isinstance(source, JudgeReward))


def priced_judges_of(config: Any) -> list[tuple[str, ...]]:
    judges = [source for source in config.reward if isinstance(source, JudgeReward)]
    return each(
        source.title for source in judges if isinstance(source.judge, RatingModel) and source.judge.has_prices
    )


def checked_judges_of(config: Any) -> list[tuple[str, ...]]:
    judges = [source for source in config.reward if isinstance(source, JudgeReward)]
    return each(source.title for source in judges if source.agreement is not None)


def rewarded(summed: str, failed: str) -> tuple[Metric, ...]:
    """Returns the metrics of the rewards of a stage's answers. `summed`: description of how the sources'
    rewards are combined."""
    return (
        Metric(
            "reward/mean reward/std", f"mean and standard deviation over answers of {summed}", failed=failed
        ),
        Metric(
            "reward/SOURCE/mean reward/SOURCE/std",
            "mean and standard deviation of one source's rewards, before weight and standardisation",
            of=sources_of,
            failed=failed,
        ),
        Metric(
            "reward/SOURCE/failed",
            "answers without a reward from one source",
            "count",
            of=sources_of,
            failed=NO_REWARDS,
        ),
        Metric(
            "task/TASK/reward",
            "mean score of the answers to one reasoning-gym task",
            of=tasks_of,
            failed=failed,
        ),
        Metric(
            "task/TASK/right", "share of the task's answers with score 1", "share", of=tasks_of, failed=failed
        ),
        Metric("task/TASK/length", "mean number of tokens per answer to the task", "tokens", of=tasks_of),
        Metric(
            "reward/SOURCE/requests",
            "requests to a judge, including retries; in `ppo`: per iteration, including the validation before"
            " it",
            "count",
            of=judges_of,
        ),
        Metric(
            "reward/SOURCE/input_tokens reward/SOURCE/output_tokens",
            "tokens that the judge read and wrote for these requests; cached ratings need none",
            "tokens",
            of=judges_of,
        ),
        Metric(
            "judge/SOURCE/agreement",
            "share of labelled pairs (`agreement`) on which a judge prefers the chosen answer; ties count"
            " half",
            "share",
            of=checked_judges_of,
            failed=OTHER_TASTE,
        ),
        Metric(
            "judge/SOURCE/agreement/ci_low judge/SOURCE/agreement/ci_high",
            "lower and upper end of the 95 % interval",
            "share",
            of=checked_judges_of,
            failed=OTHER_TASTE,
        ),
        Metric("judge/SOURCE/pairs", "labelled pairs that the judge judged", "count", of=checked_judges_of),
        Metric(
            "reward/SOURCE/cost",
            "cost of the requests, where the judge's prices are given",
            "US$",
            of=priced_judges_of,
        ),
    )


PREFERENCES = (
    Metric("prompts", "prompts that the policy answered", "count"),
    Metric(
        "pairs",
        "pairs written",
        "count",
        MAKES_PAIRS,
        failed=(
            "Sampling gave too few pairs, because all answers to a prompt score the same: raise temperature"
            " or n_samples_per_prompt."
        ),
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
        "prompts that gave no training row, by reason",
        "count",
        of=after_run,
        failed="Many prompts gave no training row: raise temperature, n_samples_per_prompt or"
        " generate_max_len.",
    ),
    *rewarded(
        "the weighted sum, standardised as the recipe says, by which answers are compared",
        REWARDED_OTHERWISE,
    ),
    Metric(
        "reward/best reward/worst",
        "reward of the best and of the worst answer to a prompt, mean over prompts",
        failed=REWARDED_OTHERWISE,
    ),
    Metric("reward/failed", "answers without a reward", "count", failed=NO_REWARDS),
    *ANSWERS,
    *DATA,
)
