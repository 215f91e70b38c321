"""Declares metrics of PPO's validation on `eval_prompts`. They describe the best iteration, whose checkpoint
the result holds."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each
from rlhf_core.config.ppo.ppo_config import PPO
from rlhf_core.config.ppo.validation_fields import pass_sizes

EXPLOITED = (
    "PPO's reward is outside its bound. A low one means that PPO does not learn (because of the learning"
    " rate, or a reward model that it cannot optimise). A very high one with short or odd answers means that"
    " PPO exploits the reward model."
)
BY_HEART = (
    "Answers to prompts outside the training data are bad, even if answers in training are good: PPO exploits"
    " its reward, or has memorised its prompts."
)
TOO_GOOD = (
    "This value chose the checkpoint, so it is the largest of all validations and biased upwards: put the"
    " gate on eval/reward, whose answers played no part in the choice."
)
VALIDATED = Condition("with `eval_prompts`", lambda config: config.eval_prompts is not None)
RIGHT = Condition(
    "with `eval_right`", lambda config: config.eval_prompts is not None and config.eval_right is not None
)
SEVERAL = Condition(
    "with several data sources, tasks or environments",
    lambda config: (
        config.eval_prompts is not None and max(config.eval_prompts.num_parts, len(config.environments)) > 1
    ),
)


def sizes_of(config: PPO) -> list[tuple[str, ...]]:
    return each(str(size) for size in pass_sizes(config.eval_samples))


def sizes_of_parts(config: PPO) -> list[tuple[str, ...]]:
    """Returns `sizes_of` with a wildcard for the data source, task or environment, whose name only the run
    knows."""
    return [("*", *size) for size in sizes_of(config)]


def several_rewards(config: PPO) -> list[tuple[str, ...]]:
    return each(source.title for source in config.reward) if len(config.reward) > 1 else []


VALIDATION = (
    Metric(
        "eval/reward/mean eval/reward/ci_low eval/reward/ci_high",
        "mean reward of the best iteration's answers, sampled with seeds that were not used for the choice,"
        " and the 95 % interval over prompts (absent if all prompts have the same reward outside 0 to 1)",
        "",
        VALIDATED,
        failed=BY_HEART,
    ),
    Metric(
        "selection/reward/mean selection/reward/ci_low selection/reward/ci_high",
        "mean reward and 95 % interval from the validation that chose the iteration; biased upwards, as the"
        " largest of several",
        "",
        VALIDATED,
        failed=TOO_GOOD,
    ),
    Metric(
        "eval/right/mean eval/right/ci_low eval/right/ci_high",
        "share of right answers (avg@`eval_samples`), and the 95 % interval over prompts",
        "share",
        RIGHT,
        failed=BY_HEART,
    ),
    Metric(
        "eval/pass@K",
        "unbiased estimate of the probability that at least one of K answers is right, for K = 1, 2, 4, ..."
        " and `eval_samples` (Chen et al. 2021, eq. 1)",
        "share",
        RIGHT,
        sizes_of,
        BY_HEART,
    ),
    Metric(
        "eval/DATA/reward/mean eval/DATA/reward/ci_low eval/DATA/reward/ci_high",
        "mean reward on the prompts of one data source",
        "",
        SEVERAL,
        after_run,
        BY_HEART,
    ),
    Metric(
        "eval/DATA/right/mean eval/DATA/right/ci_low eval/DATA/right/ci_high",
        "share of right answers on the prompts of one data source",
        "share",
        SEVERAL.also(RIGHT),
        after_run,
        BY_HEART,
    ),
    Metric(
        "eval/DATA/pass@K",
        "pass@K on the prompts of one data source",
        "share",
        SEVERAL.also(RIGHT),
        sizes_of_parts,
        BY_HEART,
    ),
    Metric(
        "eval/reward/SOURCE/mean",
        "mean reward from one source, if there are several",
        "",
        VALIDATED,
        several_rewards,
        BY_HEART,
    ),
    Metric(
        "eval/best_iteration",
        "iteration of the checkpoint; 0: before training",
        "",
        VALIDATED,
        failed=BY_HEART,
    ),
    Metric(
        "eval/response/length",
        "mean number of tokens per answer of the chosen iteration",
        "tokens",
        VALIDATED,
        failed=BY_HEART,
    ),
    Metric(
        "eval/response/truncated",
        "share of the chosen iteration's answers that are cut",
        "share",
        VALIDATED,
        failed=BY_HEART,
    ),
    Metric("phase/validate", "duration of a validation, in seconds", "s", VALIDATED),
)
