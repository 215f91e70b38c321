"""Metrics and charts of PPO and its relatives. Values in a result are means over the last fifth of the
iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config.metrics.metric import Condition, Metric, each
from rlhf_core.config.metrics.ppo.ppo_answer_metrics import ROLLOUT
from rlhf_core.config.metrics.ppo.ppo_engine_metrics import MASKED, SAMPLER, TIMES
from rlhf_core.config.metrics.ppo.sampling_metrics import rewarded
from rlhf_core.config.metrics.shared_metrics import (
    FLOAT16,
    MERGED_AWAY,
    OVERFLOWS,
    SURVIVES,
)
from rlhf_core.config.metrics.validation_metrics import EXPLOITED, VALIDATION
from rlhf_core.config.ppo.ppo_config import PPO

OVERLONG = Condition("with `overlong_buffer`", lambda config: bool(config.overlong_buffer))
PENALTY = Condition("with `truncated_penalty`", lambda config: bool(config.truncated_penalty))
REFERENCE = Condition("with a reference", lambda config: config.has_reference)
KL_LOSS = Condition(
    "with `kl_in: loss` and no `teacher_top_k`",
    lambda config: config.kl_in == "loss" and config.has_reference and config.teacher_top_k is None,
)
TEACHER = Condition("with `teacher_top_k`", lambda config: config.teacher_top_k is not None)
CRITIC = Condition("with a critic", lambda config: config.has_critic)
LIMITED = Condition("with `stop_kl`", lambda config: config.stop_kl is not None)
MERGED = Condition(
    "with `lora` and merged weights",
    lambda config: config.lora is not None and config.engine.adapters == "merged",
)
SEVERAL_ANSWERS = Condition(
    "with several answers per prompt and a reward",
    lambda config: config.n_samples_per_prompt > 1 and config.has_reward,
)

NOT_NEARER = "The policy does not come nearer to its teacher: raise actor_learning_rate."
FAR_AWAY = (
    "PPO left its reference far behind: lower actor_learning_rate or raise init_kl_coef, and distrust its"
    " reward."
)
NO_SIGNAL = (
    "The answers to most prompts have equal rewards, and nothing is learned from them: use prompts that are"
    " neither too easy nor too hard, or set dynamic_filtering."
)
ODD_ADVANTAGES = (
    "Answers do not differ in reward, or one outweighs all others: look at reward/std, reward_clip and"
    " `normalize`."
)
LARGE_STEPS = "PPO's steps are too large: lower actor_learning_rate or max_epochs."
DISAGREES = (
    "The trainer's scoring and training passes disagree before the first step: its log-probs are wrong, not"
    " PPO; compare dtypes. With sampler_is in_ratio this is the gap to the sampler: look at sampler/gap."
)
BAD_CRITIC = "PPO's critic does not predict the returns: raise critic_learning_rate or freezing_actor_steps."


def teachers_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.teachers)


def main_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the main metrics of a stage with this configuration, as JSON. Without a reward it is the KL to
    the teacher."""
    if all(source["kind"] == "none" for source in config["reward"]):
        return ("kl/mean",)
    return ("eval/reward/mean", "reward/last_fifth", "reward/mean")


REWARDS = (
    *rewarded("the weighted sum, before standardisation", EXPLOITED),
    Metric(
        "reward/clipped", "share of answers whose reward is beyond `reward_clip`", "share", failed=EXPLOITED
    ),
    Metric(
        "reward/first_fifth reward/last_fifth",
        "mean reward of the first and of the last fifth of the logged iterations",
        failed=EXPLOITED,
    ),
    Metric(
        "reward/rise_standard_error",
        "standard error of the rise between them; 0 with fewer than 10 logged iterations, where it is"
        " unknown",
        failed=EXPLOITED,
    ),
    Metric(
        "reward/equal_groups",
        "share of the prompts with two rewarded answers or more whose rewards are all equal, from which group"
        " estimators learn nothing but the KL",
        "share",
        SEVERAL_ANSWERS,
        failed=NO_SIGNAL,
    ),
    Metric(
        "reward/length_correlation",
        "correlation of an answer's reward, before penalties, with its length, among the answers to a prompt;"
        " with one answer per prompt among all; 0 if either does not vary",
        failed="Reward goes with length: read the answers; add overlong_buffer or a reward that does not.",
    ),
    Metric(
        "reward/overlong",
        "mean over all answers of what `overlong_buffer` adds to the reward: 0 or negative",
        when=OVERLONG,
        failed=EXPLOITED,
    ),
    Metric(
        "reward/truncated",
        "mean over all answers of what `truncated_penalty` adds to the reward: 0 or negative",
        when=PENALTY,
        failed=EXPLOITED,
    ),
    Metric(
        "kl/mean",
        "mean KL to the reference by `kl_estimator`, what `kl_target` sets; with `reset_reference_every` the"
        " reference is the actor at the last reset, and not the start",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric(
        "kl/per_answer",
        "KL to the reference of `kl/mean`, summed over an answer",
        "nats",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric(
        "kl/teacher/NAME",
        "mean KL to one teacher on the answers of its own rows, by `kl_estimator`",
        "nats/token",
        of=teachers_of,
        failed=NOT_NEARER,
    ),
    Metric(
        "kl/p99",
        "99th percentile over tokens of the KL to the reference: a few tokens may carry all of it",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric(
        "kl/p10 kl/p50 kl/p90",
        "the 10th, 50th and 90th percentile: with k1 they say how far tokens moved either way",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric("kl/coef", "coefficient of the KL", when=REFERENCE, failed=FAR_AWAY),
    Metric(
        "advantage/std advantage/max",
        "standard deviation and largest absolute value of the advantages that are trained on, over answers"
        " where an answer has one, else over tokens; 0 without a signal",
        failed=ODD_ADVANTAGES,
    ),
    Metric(
        "return/mean", "mean over the answers' tokens of the returns; without a critic, of the advantages"
    ),
)
POLICY = (
    Metric("policy/loss", "policy-gradient loss, without the KL, entropy and router terms"),
    Metric(
        "policy/clip_share",
        "share of tokens whose ratio the clip changed: they have no gradient, except with cispo",
        "share",
        failed="PPO's steps are too large: many tokens are clipped; lower actor_learning_rate or max_epochs.",
    ),
    Metric(
        "policy/clip_share_low policy/clip_share_high",
        "the same, of the tokens that became less likely (ratio below 1) and more likely",
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
        "the same at the first optimiser step of an iteration: 1 and 0 when scoring and training agree,"
        " and with one step an iteration, which needs no scoring; with `sampler_is: in_ratio` the gap between"
        " sampler and trainer",
        failed=DISAGREES,
    ),
    Metric(
        "policy/kl_old",
        "KL from the policy at the iteration's start (with `sampler_is: in_ratio` from the sampler), k3"
        " estimate, mean over the steps",
        "nats/token",
        failed=LARGE_STEPS,
    ),
    Metric(
        "policy/entropy",
        "mean entropy at the answers' tokens of the distribution that is sampled",
        "nats/token",
        failed="PPO's policy has collapsed to few answers, or came apart: look at its answers, learning rate"
        " and entropy_coef.",
    ),
    Metric(
        "policy/entropy_p10 policy/entropy_p50 policy/entropy_p90",
        "percentiles of that entropy over the tokens of an optimiser step, to 2 %; the mean hides that a few"
        " tokens, where the answer branches, have almost all of it",
        "nats/token",
        failed="Where tokens branch the policy has collapsed (p90 near 0), or all of it came apart (p10 far"
        " above 0): look at its answers, learning rate and entropy_coef.",
    ),
    Metric(
        "policy/grad_norm",
        "gradient norm of the actor before the clip",
        failed="PPO is unstable: lower actor_learning_rate.",
    ),
    Metric("policy/learning_rate", "learning rate of the actor"),
    Metric("policy/loss_scale", "factor of the actor's loss, by which gradients are divided", when=FLOAT16),
    Metric(
        "policy/overflow",
        "share of the actor's optimiser steps that were skipped because a gradient overflowed float16",
        "share",
        FLOAT16,
        failed=OVERFLOWS,
    ),
    Metric(
        "policy/empty_steps",
        "optimiser steps without a token to train on, which are skipped; other metrics are means over the"
        " remaining steps",
        "count",
        MASKED,
        failed="Steps had no token whose weight is within sampler_is_clamp: widen it, or look at"
        " sampler/gap.",
    ),
    Metric(
        "policy/skipped_steps",
        "the actor's optimiser steps that were left out because policy/kl_old was above stop_kl before them;"
        " other metrics are means over the remaining steps",
        "count",
        LIMITED,
        failed=LARGE_STEPS,
    ),
    Metric(
        "policy/kl_loss",
        "KL to the reference in the loss, without its coefficient",
        "nats/token",
        when=KL_LOSS,
    ),
    Metric(
        "policy/teacher_kl",
        "reverse KL to the teacher over its `teacher_top_k` tokens and all others together, without its"
        " coefficient: at most the KL of the whole distributions",
        "nats/token",
        when=TEACHER,
        failed=NOT_NEARER,
    ),
    Metric(
        SURVIVES,
        "share of the adapters' update that the weights of the last sync have",
        "share",
        MERGED,
        failed=MERGED_AWAY,
    ),
    Metric(
        "value/loss",
        "half the squared error of the values, clipped by `value_clip`",
        when=CRITIC,
        failed=BAD_CRITIC,
    ),
    Metric(
        "value/clip_share",
        "share of tokens without a gradient because of `value_clip`",
        "share",
        CRITIC,
        failed=BAD_CRITIC,
    ),
    Metric("value/grad_norm", "gradient norm of the critic before the clip", when=CRITIC, failed=BAD_CRITIC),
    Metric("value/learning_rate", "learning rate of the critic", when=CRITIC),
    Metric(
        "value/explained_variance",
        "share of the returns' variance that the values explain: 1 is perfect, 0 no better than a constant,"
        " below 0 worse",
        "",
        CRITIC,
        failed=BAD_CRITIC,
    ),
)
REINFORCED = (*REWARDS, *VALIDATION, *POLICY, *SAMPLER, *ROLLOUT, *TIMES)
