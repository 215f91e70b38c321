"""Metrics of rewarded answers, and of a preferences stage (a round of a loop)."""

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
    "The rewards of the sampled answers are not as expected: the policy or the reward model before this"
    " stage is bad."
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
    """Returns the metrics of the rewards of a stage's answers. `summed`: how the sources are added."""
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
            "answers to which one source gave no reward",
            "count",
            of=sources_of,
            failed=NO_REWARDS,
        ),
        Metric(
            "task/TASK/reward",
            "mean score of the answers to a task of reasoning-gym",
            of=tasks_of,
            failed=failed,
        ),
        Metric(
            "task/TASK/right", "share of its answers with the score 1", "share", of=tasks_of, failed=failed
        ),
        Metric("task/TASK/length", "mean tokens of its answers", "tokens", of=tasks_of),
        Metric(
            "reward/SOURCE/requests",
            "requests to a judge, with retries; in `ppo` of an iteration, with the validation before it",
            "count",
            of=judges_of,
        ),
        Metric(
            "reward/SOURCE/input_tokens reward/SOURCE/output_tokens",
            "tokens that it read and wrote for them; ratings from its cache need none",
            "tokens",
            of=judges_of,
        ),
        Metric(
            "judge/SOURCE/agreement",
            "share of labelled pairs (`agreement`) on which a judge prefers the chosen answer, ties half",
            "share",
            of=checked_judges_of,
            failed=OTHER_TASTE,
        ),
        Metric(
            "judge/SOURCE/agreement/ci_low judge/SOURCE/agreement/ci_high",
            "its 95 % interval",
            "share",
            of=checked_judges_of,
            failed=OTHER_TASTE,
        ),
        Metric("judge/SOURCE/pairs", "labelled pairs that it judged", "count", of=checked_judges_of),
        Metric(
            "reward/SOURCE/cost", "their cost, where the judge's prices are given", "US$", of=priced_judges_of
        ),
    )


PREFERENCES = (
    Metric("prompts", "prompts that the policy answered", "count"),
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
    *rewarded(
        "the weighted sum, standardised as the recipe says: what answers are compared by",
        REWARDED_OTHERWISE,
    ),
    Metric(
        "reward/best reward/worst",
        "mean over prompts of the best and of the worst answer",
        failed=REWARDED_OTHERWISE,
    ),
    Metric("reward/failed", "answers without a reward", "count", failed=NO_REWARDS),
    *ANSWERS,
    *DATA,
)
