"""Declares metrics of PPO's answers: how they are sampled, replaced and limited."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric, each
from rlhf_core.config.metrics.shared_metrics import ANSWERS, DATA, EXPERTS
from rlhf_core.config.metrics.validation_metrics import EXPLOITED
from rlhf_core.config.ppo.ppo_config import PPO

DRAFTS = Condition("with drafted tokens", lambda config: config.engine.drafts is not None)
FILTERED = Condition("with `dynamic_filtering`", lambda config: config.dynamic_filtering)
CURRICULUM = Condition("with `curriculum`", lambda config: config.curriculum is not None)
EPISODES = Condition("with an environment", lambda config: bool(config.talks_to))
STALE = Condition("with `max_staleness`", lambda config: bool(config.max_staleness))
CONTINUOUS = Condition(
    "with `max_staleness` of 2 or more, or of 1 and `dynamic_filtering`",
    lambda config: config.continuous,
)
OLD_ANSWERS = "Training uses answers that were sampled long before: lower max_staleness."
LOST = (
    "Many answers were unusable for training: a reward source failed, a prompt's answers lost their rewards,"
    " or mask_truncated left out cut answers."
)


def environments_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.environments)


ROLLOUT = (
    Metric("rollout/usable", "share of answers that were used in training", "share", failed=LOST),
    Metric(
        "rollout/tokens_per_step",
        "tokens per decoding step of an answer; 1 if every drafted token was wrong",
        "tokens",
        DRAFTS,
    ),
    Metric(
        "rollout/age",
        "number of updates between sampling and training, mean over tokens",
        "updates",
        STALE,
        failed=OLD_ANSWERS,
    ),
    Metric(
        "rollout/age_max",
        "number of updates between sampling and training, maximum over tokens",
        "updates",
        CONTINUOUS,
        failed=OLD_ANSWERS,
    ),
    Metric(
        "rollout/waiting",
        "prompts with finished but untrained answers when an iteration begins",
        "count",
        CONTINUOUS,
    ),
    Metric(
        "rollout/lead",
        "number of batches beyond the iteration's own that the engines may start: 1 to `max_staleness`",
        "count",
        CONTINUOUS,
    ),
    Metric(
        "filter/rounds filter/looked_at filter/groups",
        "rounds of sampling (with `max_staleness`: the number of rounds that would examine as many groups);"
        " groups whose rewards arrived since the last iteration; groups used in training",
        "count",
        FILTERED,
    ),
    Metric(
        "filter/accepted",
        "share of the groups that have a signal; in the other groups all rewards are equal or missing",
        "share",
        FILTERED,
    ),
    Metric(
        "filter/reward_mean filter/reward_std",
        "mean and standard deviation of the rewards in the groups used in training; `reward/*` cover all"
        " groups",
        when=FILTERED,
    ),
    Metric(
        "curriculum/mean_pass_rate",
        "pass rate (share of a prompt's answers that are right), mean over the prompts with a known pass"
        " rate; older answers count less",
        "share",
        CURRICULUM,
        failed=(
            "The prompts are too easy (near 1) or too hard (near 0): use other prompts, or change"
            " curriculum.target."
        ),
    ),
    Metric(
        "curriculum/solved",
        "share of all prompts whose most recent answers were all right",
        "share",
        CURRICULUM,
        failed="Most prompts are solved: use harder ones.",
    ),
    Metric(
        "curriculum/unseen",
        "share of all prompts without a pass rate: not answered yet, and not known from a column",
        "share",
        CURRICULUM,
        failed="The run ended before it had tried all prompts: raise num_episodes, or use fewer prompts.",
    ),
    Metric("environment/turns", "mean number of answers per episode", "count", EPISODES),
    Metric(
        "environment/conversations",
        "mean number of conversations per episode; above 1 only for an agent that starts several",
        "count",
        EPISODES,
    ),
    Metric("environment/attempts", "mean number of attempts per episode", "count", EPISODES),
    Metric(
        "environment/seconds",
        "mean time in seconds that the environment itself took in the last attempt of an episode",
        "s",
        EPISODES,
    ),
    Metric(
        "environment/ended_by_turns environment/ended_by_tokens environment/ended_by_time",
        "share of the episodes ended by a limit: on turns (max_turns), on tokens (generate_max_len,"
        " answer_max_len or prompt_max_len), or on time (the environment's timeout in the last attempt)",
        "share",
        EPISODES,
        failed=(
            "Limits end episodes: raise the limit that the metric names, or look at how the policy uses its"
            " turns, tokens and time."
        ),
    ),
    Metric(
        "environment/NAME/reward",
        "mean reward of one environment's episodes, if the environment gives the reward",
        of=environments_of,
        failed=EXPLOITED,
    ),
    Metric(
        "environment/NAME/right",
        "share of one environment's episodes with a reward of 1 or more",
        "share",
        of=environments_of,
        failed=EXPLOITED,
    ),
    Metric(
        "environment/NAME/length",
        "mean number of answer tokens per episode of one environment",
        "tokens",
        of=environments_of,
    ),
    EXPERTS,
    *ANSWERS,
    Metric(
        "response/length_p10 response/length_p50 response/length_p90 response/length_max",
        "10th, 50th and 90th percentile of the answers' lengths, and the maximum",
        "tokens",
        failed="The lengths of answers are not as expected: read answers on the run's page.",
    ),
    Metric("tokens", "tokens of prompts and answers in an iteration", "tokens"),
    Metric("iterations", "iterations", "count"),
    *DATA,
)
