"""Declares metrics of PPO and its relatives. Values in a result are means over the last fifth of the
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

NOT_NEARER = "The policy does not move closer to its teacher: raise actor_learning_rate."
FAR_AWAY = (
    "PPO moved far from its reference: lower actor_learning_rate or raise init_kl_coef, and distrust its"
    " reward."
)
NO_SIGNAL = (
    "Most prompts' answers all have the same reward, so PPO learns nothing from them: use prompts that are"
    " neither too easy nor too hard, or set dynamic_filtering."
)
ODD_ADVANTAGES = (
    "Answers do not differ in reward, or a single one dominates: look at reward/std, reward_clip and"
    " `normalize`."
)
LARGE_STEPS = "PPO's steps are too large: lower actor_learning_rate or max_epochs."
DISAGREES = (
    "The trainer's scoring and training passes disagree before the first step: the log-probs are wrong, not"
    " PPO. Compare dtypes. With sampler_is in_ratio this value is the gap to the sampler: look at"
    " sampler/gap."
)
BAD_CRITIC = "PPO's critic does not predict the returns: raise critic_learning_rate or freezing_actor_steps."


def teachers_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.teachers)


def main_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the names of the main metrics of a stage with this configuration (as JSON). Without a reward,
    the main metric is the KL to the teacher."""
    if all(source["kind"] == "none" for source in config["reward"]):
        return ("kl/mean",)
    return ("eval/reward/mean", "reward/last_fifth", "reward/mean")


REWARDS = (
    *rewarded("the weighted sum, before standardisation", EXPLOITED),
    Metric(
        "reward/clipped", "share of answers whose reward exceeds `reward_clip`", "share", failed=EXPLOITED
    ),
    Metric(
        "reward/first_fifth reward/last_fifth",
        "mean reward of the first and of the last fifth of the logged iterations",
        failed=EXPLOITED,
    ),
    Metric(
        "reward/rise_standard_error",
        "standard error of the difference between the last and the first fifth; 0 with fewer than 10 logged"
        " iterations, where it is unknown",
        failed=EXPLOITED,
    ),
    Metric(
        "reward/equal_groups",
        "among prompts with two or more rewarded answers: share whose rewards are all equal, so that group"
        " estimators learn only from the KL",
        "share",
        SEVERAL_ANSWERS,
        failed=NO_SIGNAL,
    ),
    Metric(
        "reward/length_correlation",
        "correlation of an answer's reward, before penalties, with its length, within the answers to each"
        " prompt (with one answer per prompt: over all answers); 0 if either does not vary",
        failed=(
            "Reward correlates with length: read the answers; add overlong_buffer, or a reward that does not"
            " depend on length."
        ),
    ),
    Metric(
        "reward/overlong",
        "amount that `overlong_buffer` adds to the reward (0 or negative), mean over all answers",
        when=OVERLONG,
        failed=EXPLOITED,
    ),
    Metric(
        "reward/truncated",
        "amount that `truncated_penalty` adds to the reward (0 or negative), mean over all answers",
        when=PENALTY,
        failed=EXPLOITED,
    ),
    Metric(
        "kl/mean",
        "mean KL to the reference by `kl_estimator`, which `kl_target` controls; with `reset_reference_every`"
        " the reference is the actor at the last reset, not the starting model",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric(
        "kl/per_answer",
        "KL of `kl/mean`, summed over an answer instead of averaged over tokens",
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
        "99th percentile over tokens of the KL to the reference; a few tokens may contribute all of the KL",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric(
        "kl/p10 kl/p50 kl/p90",
        "10th, 50th and 90th percentile over tokens of the KL to the reference; with k1 they show how far"
        " tokens moved in either direction",
        "nats/token",
        REFERENCE,
        failed=FAR_AWAY,
    ),
    Metric("kl/coef", "coefficient of the KL", when=REFERENCE, failed=FAR_AWAY),
    Metric(
        "advantage/std advantage/max",
        "standard deviation and largest absolute value of the advantages used in training, over answers if"
        " each answer has a single advantage, else over tokens; 0 without a signal",
        failed=ODD_ADVANTAGES,
    ),
    Metric(
        "return/mean", "mean of the returns (without a critic: of the advantages) over the answers' tokens"
    ),
)
POLICY = (
    Metric("policy/loss", "policy-gradient loss, without the KL, entropy and router terms"),
    Metric(
        "policy/clip_share",
        "share of tokens whose ratio was clipped; they have no gradient, except with cispo",
        "share",
        failed=(
            "PPO's steps are so large that many tokens are clipped: lower actor_learning_rate or max_epochs."
        ),
    ),
    Metric(
        "policy/clip_share_low policy/clip_share_high",
        "share of clipped tokens that became less likely (ratio below 1), and that became more likely",
        "share",
        failed=(
            "PPO's steps are so large that many tokens are clipped: lower actor_learning_rate or max_epochs."
        ),
    ),
    Metric(
        "policy/ratio policy/ratio_gap",
        "mean ratio new / old, and its mean distance from 1",
        failed=(
            "PPO's steps are so large that the policy moves far within one rollout: lower"
            " actor_learning_rate."
        ),
    ),
    Metric(
        "policy/first_ratio policy/first_ratio_gap",
        "these two values at the first optimiser step of an iteration: 1 and 0 if scoring and training agree,"
        " or with one step per iteration, which needs no scoring; with `sampler_is: in_ratio` they show the"
        " gap between sampler and trainer",
        failed=DISAGREES,
    ),
    Metric(
        "policy/kl_old",
        "KL to the policy at the iteration's start (with `sampler_is: in_ratio`: to the sampler), k3"
        " estimate, mean over the steps",
        "nats/token",
        failed=LARGE_STEPS,
    ),
    Metric(
        "policy/entropy",
        "mean entropy of the sampling distribution at the answers' tokens",
        "nats/token",
        failed=(
            "PPO's policy has collapsed to few answers, or become nearly random: look at its answers,"
            " learning rate and entropy_coef."
        ),
    ),
    Metric(
        "policy/entropy_p10 policy/entropy_p50 policy/entropy_p90",
        "10th, 50th and 90th percentile of that entropy over the tokens of an optimiser step, accurate to 2"
        " %. The mean hides that a few tokens, where the answer branches, have almost all of the entropy",
        "nats/token",
        failed=(
            "The policy has collapsed at branching tokens (p90 near 0), or become nearly random everywhere"
            " (p10 far above 0): look at its answers, learning rate and entropy_coef."
        ),
    ),
    Metric(
        "policy/grad_norm",
        "gradient norm of the actor before clipping",
        failed="PPO is unstable: lower actor_learning_rate.",
    ),
    Metric("policy/learning_rate", "learning rate of the actor"),
    Metric(
        "policy/loss_scale",
        "factor that the actor's loss is multiplied by, and its gradients divided by",
        when=FLOAT16,
    ),
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
        failed=(
            "Some steps had no token with a weight within sampler_is_clamp: widen it, or look at sampler/gap."
        ),
    ),
    Metric(
        "policy/skipped_steps",
        "optimiser steps of the actor that were skipped because policy/kl_old had exceeded stop_kl; other"
        " metrics are means over the remaining steps",
        "count",
        LIMITED,
        failed=LARGE_STEPS,
    ),
    Metric(
        "policy/kl_loss",
        "KL to the reference in the loss, without the coefficient",
        "nats/token",
        when=KL_LOSS,
    ),
    Metric(
        "policy/teacher_kl",
        "reverse KL to the teacher over its `teacher_top_k` most probable tokens, with all other tokens taken"
        " as one, without the coefficient: at most the KL of the whole distributions",
        "nats/token",
        when=TEACHER,
        failed=NOT_NEARER,
    ),
    Metric(
        SURVIVES,
        "share of the adapters' update that is present in the weights of the last sync",
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
    Metric("value/grad_norm", "gradient norm of the critic before clipping", when=CRITIC, failed=BAD_CRITIC),
    Metric("value/learning_rate", "learning rate of the critic", when=CRITIC),
    Metric(
        "value/explained_variance",
        "share of the returns' variance that the values explain: 1 is perfect, 0 is no better than a"
        " constant, below 0 is worse",
        "",
        CRITIC,
        failed=BAD_CRITIC,
    ),
)
REINFORCED = (*REWARDS, *VALIDATION, *POLICY, *SAMPLER, *ROLLOUT, *TIMES)
