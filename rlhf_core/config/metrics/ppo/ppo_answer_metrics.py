"""Metrics of PPO's answers: how they are sampled, replaced and limited."""

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
    "with `max_staleness` of 2 or more, or with it and `dynamic_filtering`",
    lambda config: config.continuous,
)
OLD_ANSWERS = "Answers are trained on long after they were sampled: lower max_staleness."
LOST = (
    "Many answers could not be learned from: a reward source failed, a prompt's answers lost their"
    " rewards, or mask_truncated left out cut answers."
)


def environments_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.environments)


ROLLOUT = (
    Metric("rollout/usable", "share of answers that were trained on", "share", failed=LOST),
    Metric(
        "rollout/tokens_per_step",
        "tokens of a decoding step of an answer; 1 where no drafted token was right",
        "tokens",
        DRAFTS,
    ),
    Metric(
        "rollout/age",
        "updates between sampling and training, mean over tokens",
        "updates",
        STALE,
        failed=OLD_ANSWERS,
    ),
    Metric("rollout/age_max", "the same, largest", "updates", CONTINUOUS, failed=OLD_ANSWERS),
    Metric(
        "rollout/waiting",
        "prompts whose answers are finished and not trained on, when an iteration begins",
        "count",
        CONTINUOUS,
    ),
    Metric(
        "rollout/lead",
        "how many batches beyond the iteration's own may be begun: 1 to `max_staleness`",
        "count",
        CONTINUOUS,
    ),
    Metric(
        "filter/rounds filter/looked_at filter/groups",
        "rounds of sampling (with `max_staleness`: how many would look at as many groups); groups whose"
        " rewards came since the last iteration; groups that are trained on",
        "count",
        FILTERED,
    ),
    Metric(
        "filter/accepted",
        "share of the groups that have a signal; the rewards of the others are all equal, or missing",
        "share",
        FILTERED,
    ),
    Metric(
        "filter/reward_mean filter/reward_std",
        "rewards of the groups that are trained on; `reward/*` are of all groups",
        when=FILTERED,
    ),
    Metric(
        "curriculum/mean_pass_rate",
        "share of right answers of a prompt, mean over the prompts that have one; older answers count less",
        "share",
        CURRICULUM,
        failed="The prompts are too easy (near 1) or too hard (near 0): take others, or change"
        " curriculum.target.",
    ),
    Metric(
        "curriculum/solved",
        "share of all prompts whose last answers were all right",
        "share",
        CURRICULUM,
        failed="Most prompts are solved: take harder ones.",
    ),
    Metric(
        "curriculum/unseen",
        "share of all prompts without a pass rate: neither answered yet nor known from a column",
        "share",
        CURRICULUM,
        failed="The run ended before it had looked at all prompts: raise num_episodes, or take fewer.",
    ),
    Metric("environment/turns", "mean answers of an episode", "count", EPISODES),
    Metric(
        "environment/conversations",
        "mean conversations of an episode; above 1 only for an agent that begins several",
        "count",
        EPISODES,
    ),
    Metric("environment/attempts", "mean attempts of an episode", "count", EPISODES),
    Metric(
        "environment/seconds",
        "mean seconds that the environment itself took in the last attempt of an episode",
        "s",
        EPISODES,
    ),
    Metric(
        "environment/ended_by_turns environment/ended_by_tokens environment/ended_by_time",
        "share of the episodes that a limit ended: max_turns; generate_max_len, answer_max_len or"
        " prompt_max_len; the environment's timeout in its last attempt",
        "share",
        EPISODES,
        failed="Limits end episodes: raise the named one, or look at what the policy does with its turns,"
        " tokens and time.",
    ),
    Metric(
        "environment/NAME/reward",
        "mean reward of the episodes of one environment, where it gives the reward",
        of=environments_of,
        failed=EXPLOITED,
    ),
    Metric(
        "environment/NAME/right",
        "share of its episodes with a reward of 1 or more",
        "share",
        of=environments_of,
        failed=EXPLOITED,
    ),
    Metric("environment/NAME/length", "mean tokens of its episodes' answers", "tokens", of=environments_of),
    EXPERTS,
    *ANSWERS,
    Metric(
        "response/length_p10 response/length_p50 response/length_p90 response/length_max",
        "percentiles of the answers' lengths, and the longest",
        "tokens",
        failed="The lengths of answers are not as expected: look at the answers on the page.",
    ),
    Metric("tokens", "tokens of prompts and answers in an iteration", "tokens"),
    Metric("iterations", "iterations", "count"),
    *DATA,
)
