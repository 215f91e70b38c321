"""Metrics of PPO's engines and processes: how far sampler and trainer are apart, and where time goes."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each
from rlhf_core.config.ppo.ppo_config import PPO

MASKED = Condition("with `sampler_is: mask`", lambda config: config.sampler_is == "mask")
SLEEPS = Condition("with `engine.sleep`", lambda config: config.engine.sleep)

OTHER_POLICY = (
    "The engine's log-probs are far from the trainer's: the samples come from another policy; compare dtypes"
    " and versions."
)
NOT_WHOLE = (
    "The engine's log-probs are far from the trainer's right after a weight update: weights did not arrive"
    " whole."
)


def roles_of(config: PPO) -> list[tuple[str, ...]]:
    return each(config.placed)


def phases_of_roles(config: PPO) -> list[tuple[str, ...]]:
    return [("*", "*")]


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
        "sampler/masked_tokens sampler/masked_answers",
        "share of the tokens that are left out of the loss, and of the answers that are left out whole",
        "share",
        MASKED,
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/weight_mean sampler/weight_max",
        "`weight_mean`: mean weight in the loss; `weight_max`: largest weight before the bounds",
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
        "largest difference of log-probs of engine and actor on fixed prompts right after a weight sync"
        " (the 90th"
        " percentile for mixtures of experts in bf16)",
        "nats",
        failed=NOT_WHOLE,
    ),
    Metric(
        "sync/probe_bound",
        "the largest such difference that rounding explains: 4 times what noise of the size of rounding"
        " errors does to the actor's log-probs, and at least 0.001 in float32 and 0.02 in bfloat16",
        "nats",
        failed=NOT_WHOLE,
    ),
)
TIMES = (
    Metric(
        "phase/generate phase/score phase/credit phase/train phase/sync phase/probe",
        "wall-clock time of the phase in an iteration; overlapped work counts only while it is waited for",
        "s",
    ),
    Metric("phase/sleep phase/wake", "time until the engines sleep and are awake", "s", SLEEPS),
    Metric(
        "floor/generate floor/score floor/train",
        "lower bound of the phase's time, at the rates measured on the actor's GPU",
        "s",
    ),
    Metric(
        "work/ROLE/PHASE",
        "time that the slowest rank of a role works in a phase of an iteration",
        "s",
        of=phases_of_roles,
    ),
    Metric(
        "memory/ROLE",
        "peak memory of PyTorch's tensors on a GPU in an iteration, of the role's largest rank; `/held`:"
        " peak that"
        " its allocator reserved; `/kept`: reserved at the iteration's end",
        "GiB",
        of=after_run,
    ),
    Metric("wait/ROLE", "share of the iteration that a role waits", "share", of=roles_of),
)
