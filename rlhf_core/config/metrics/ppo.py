"""Metrics and charts of PPO and its relatives. Values in a result are means over the last fifth of the
iterations."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric, Panel, after_run, each
from rlhf_core.config.metrics.ppo_validation import EXPLOITED, VALIDATION
from rlhf_core.config.metrics.sampling import rewarded
from rlhf_core.config.metrics.shared import ANSWERS, DATA, EXPERTS, MERGED_AWAY, SURVIVES
from rlhf_core.config.ppo import PPO

OVERLONG = Condition("with `overlong_buffer`", lambda config: bool(config.overlong_buffer))
PENALTY = Condition("with `truncated_penalty`", lambda config: bool(config.truncated_penalty))
REFERENCE = Condition("with a reference", lambda config: config.has_reference)
KL_LOSS = Condition("with `kl_in: loss`", lambda config: config.kl_in == "loss" and config.has_reference)
CRITIC = Condition("with a critic", lambda config: config.has_critic)
MASKED = Condition("with `sampler_is: mask`", lambda config: config.sampler_is == "mask")
MERGED = Condition(
    "with `lora` and merged weights",
    lambda config: config.lora is not None and config.engine.adapters == "merged",
)
DRAFTS = Condition("with drafted tokens", lambda config: config.engine.drafts is not None)
FILTERED = Condition("with `dynamic_filtering`", lambda config: config.dynamic_filtering)
EPISODES = Condition("with an environment", lambda config: config.environment is not None)
STALE = Condition("with `max_staleness`", lambda config: bool(config.max_staleness))
CONTINUOUS = Condition(
    "with `max_staleness` of 2 or more", lambda config: bool(config.max_staleness) and config.continuous
)
SLEEPS = Condition("with `engine.sleep`", lambda config: config.engine.sleep)

FAR_AWAY = (
    "PPO left its reference far behind: lower actor_learning_rate or raise init_kl_coef, and distrust its"
    " reward."
)
LARGE_STEPS = "PPO's steps are too large: lower actor_learning_rate or max_epochs."
DISAGREES = (
    "Sampling and training disagree before the first step: not PPO is bad, but its log-probs; compare dtypes."
)
BAD_CRITIC = "PPO's critic does not predict the returns: raise critic_learning_rate or freezing_actor_steps."
OTHER_POLICY = (
    "The engine's log-probs are far from the trainer's: the samples come from another policy; compare dtypes"
    " and versions."
)
NOT_WHOLE = (
    "The engine's log-probs are far from the trainer's right after a weight update: weights did not arrive"
    " whole."
)
LOST = (
    "Many answers could not be learned from: a reward source failed, or a prompt's answers lost their"
    " rewards."
)


def roles_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.placed)


def phases_of_roles(config: PPO) -> list[tuple[str, ...]]:
    return [("*", "*")]


REWARDS = (
    *rewarded(EXPLOITED),
    Metric(
        "reward/clipped", "share of answers whose reward is beyond `reward_clip`", "share", failed=EXPLOITED
    ),
    Metric(
        "reward/first_fifth reward/last_fifth reward/rise_standard_error",
        "mean reward of the first and of the last fifth of the iterations; standard error of the rise",
        failed=EXPLOITED,
    ),
    Metric("reward/overlong", "mean penalty for long answers", when=OVERLONG, failed=EXPLOITED),
    Metric("reward/truncated", "mean penalty for cut answers", when=PENALTY, failed=EXPLOITED),
    Metric(
        "kl/mean", "KL to the reference, the unit of `kl_target`", "nats/token", REFERENCE, failed=FAR_AWAY
    ),
    Metric("kl/per_answer", "KL to the reference, summed over an answer", "nats", REFERENCE, failed=FAR_AWAY),
    Metric("kl/coef", "coefficient of the KL", when=REFERENCE, failed=FAR_AWAY),
    Metric("return/mean", "mean return"),
)
POLICY = (
    Metric("policy/loss", "loss of the actor"),
    Metric(
        "policy/clip_share",
        "share of tokens whose gradient the clip cut",
        "share",
        failed="PPO's steps are too large: many tokens are clipped; lower actor_learning_rate or max_epochs.",
    ),
    Metric(
        "policy/ratio policy/ratio_gap",
        "mean ratio new / old, and its mean distance from 1",
        failed="PPO's steps are too large: the policy moves far within one rollout; lower"
        " actor_learning_rate.",
    ),
    Metric(
        "policy/first_ratio policy/first_ratio_gap",
        "the same at the first optimiser step of an iteration: 1 and 0 when scoring and training agree",
        failed=DISAGREES,
    ),
    Metric(
        "policy/kl_old",
        "KL from the policy at the iteration's start, k3 estimate",
        "nats",
        failed=LARGE_STEPS,
    ),
    Metric(
        "policy/entropy",
        "entropy of the actor's distribution",
        "nats",
        failed="PPO's policy has collapsed to few answers, or came apart: look at its answers, learning rate"
        " and entropy_coef.",
    ),
    Metric(
        "policy/grad_norm",
        "gradient norm of the actor before the clip",
        failed="PPO is unstable: lower actor_learning_rate.",
    ),
    Metric("policy/learning_rate", "learning rate of the actor"),
    Metric(
        "policy/empty_steps",
        "optimiser steps without a token to train on, which are skipped; other metrics are means over the"
        " remaining steps",
        "count",
        MASKED,
        failed="Steps had no token whose weight is within sampler_is_clamp: widen it, or look at"
        " sampler/gap.",
    ),
    Metric("policy/kl_loss", "the KL term", when=KL_LOSS),
    Metric(
        SURVIVES,
        "share of the adapters' update that the weights of the last sync have",
        "share",
        MERGED,
        failed=MERGED_AWAY,
    ),
    Metric("value/loss", "loss of the critic", when=CRITIC, failed=BAD_CRITIC),
    Metric("value/clip_share", "share of clipped values", "share", CRITIC, failed=BAD_CRITIC),
    Metric("value/grad_norm", "gradient norm of the critic before the clip", when=CRITIC, failed=BAD_CRITIC),
    Metric("value/learning_rate", "learning rate of the critic", when=CRITIC, failed=BAD_CRITIC),
    Metric(
        "value/explained_variance",
        "share of the returns' variance that the values explain",
        "share",
        CRITIC,
        failed=BAD_CRITIC,
    ),
)
ROLLOUT = (
    Metric("rollout/usable", "share of answers that were trained on", "share", failed=LOST),
    Metric(
        "rollout/tokens_per_step",
        "tokens that a step of an answer sampled, 1 where no draft was right",
        "tokens",
        DRAFTS,
        failed=LOST,
    ),
    Metric(
        "rollout/age",
        "updates between sampling and training, mean over tokens",
        "updates",
        STALE,
        failed=LOST,
    ),
    Metric("rollout/age_max", "the same, largest", "updates", CONTINUOUS, failed=LOST),
    Metric(
        "rollout/waiting",
        "prompts whose answers are finished and not trained on, when an iteration begins",
        "count",
        CONTINUOUS,
        failed=LOST,
    ),
    Metric(
        "rollout/lead",
        "batches of prompts that are begun beyond that of the iteration",
        "count",
        CONTINUOUS,
        failed=LOST,
    ),
    Metric(
        "filter/rounds filter/groups",
        "rounds of sampling; groups that are trained on",
        "count",
        FILTERED,
    ),
    Metric("filter/accepted", "accepted share of the groups", "share", FILTERED),
    Metric(
        "filter/reward_mean filter/reward_std",
        "rewards of the groups that are trained on; `reward/*` are of all groups",
        when=FILTERED,
    ),
    Metric("environment/turns", "mean answers of an episode", "count", EPISODES),
    Metric("environment/attempts", "mean attempts of an episode", "count", EPISODES),
    Metric("environment/seconds", "mean seconds of the environment's own in an episode", "s", EPISODES),
    EXPERTS,
    *ANSWERS,
    Metric("tokens", "tokens of prompts and answers in an iteration", "tokens"),
    Metric("iterations", "iterations", "count"),
    *DATA,
)
SAMPLER = (
    Metric(
        "sampler/gap sampler/gap_p99",
        "absolute difference of log-probs between the engine and the trainer on the sampled tokens: mean and"
        " 99th percentile",
        "nats",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/ratio_gap",
        "mean distance of the tokens' importance weights from 1, before any bound",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/capped",
        "share of the weights in the loss, one a token or one an answer (`sampler_is_level`), that the bounds"
        " cut or left out",
        "share",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/weight_mean sampler/weight_max",
        "mean of these weights; largest before the bounds",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/ess",
        "effective sample size of these weights: 1 if all are equal; below 0.5 the answers effectively come"
        " from another policy",
        "share",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sync/probe_gap",
        "largest difference of log-probs of engine and actor on fixed prompts right after a weight sync (of"
        " nine of ten tokens, for mixtures of experts in bf16)",
        "nats",
        failed=NOT_WHOLE,
    ),
    Metric(
        "sync/probe_bound",
        "the largest such difference that rounding explains: 4 times what noise of the size of rounding"
        " errors does to the actor's log-probs",
        "nats",
        failed=NOT_WHOLE,
    ),
)
TIMES = (
    Metric(
        "phase/generate phase/score phase/credit phase/train phase/sync phase/probe",
        "seconds of an iteration",
        "s",
    ),
    Metric("phase/sleep phase/wake", "seconds of an iteration", "s", SLEEPS),
    Metric(
        "floor/generate floor/score floor/train",
        "minimum times of these phases at the rates measured on the actor's GPU",
        "s",
    ),
    Metric("work/ROLE/PHASE", "time that a role works in an iteration", "s", of=phases_of_roles),
    Metric(
        "memory/ROLE",
        "largest size of a role's tensors; `/held`: held by its allocator; `/kept`: held while engines"
        " sample",
        "GiB",
        of=after_run,
    ),
    Metric("wait/ROLE", "share of the iteration that a role waits", "share", of=roles_of),
)
REINFORCED = (*REWARDS, *VALIDATION, *POLICY, *SAMPLER, *ROLLOUT, *TIMES)

CHARTS = (
    Panel("Reward of the answers (band: ± 1 std)", {"reward/mean": "mean"}, band="reward/std"),
    Panel(
        "Reward on eval_prompts",
        {"eval/reward/mean": "mean", "eval/reward/ci_low": "95 % interval", "eval/reward/ci_high": ""},
    ),
    Panel("Right answers on eval_prompts", {"eval/right/mean": ""}),
    Panel("KL to the reference", {"kl/mean": ""}, level=0.0),
    Panel("Answer length (tokens)", {"response/length": ""}),
    Panel("Policy ratio", {"policy/ratio": ""}, level=1.0),
    Panel("Share of clipped tokens", {"policy/clip_share": ""}),
    Panel("Share of truncated answers", {"response/truncated": ""}),
    Panel("Value loss", {"value/loss": ""}),
    Panel("Explained variance of the values", {"value/explained_variance": ""}, level=0.0),
    Panel("Log-prob gap, sampler to trainer", {"sampler/gap": ""}),
)
