"""Declares metrics of PPO's engines and processes: how much sampler and trainer differ, and how time is
spent."""

from __future__ import annotations

from rlhf_core.config.metrics.metric import Condition, Metric, after_run, each
from rlhf_core.config.ppo.ppo_config import PPO

MASKED = Condition("with `sampler_is: mask`", lambda config: config.sampler_is == "mask")
SLEEPS = Condition("with `engine.sleep`", lambda config: config.engine.sleep)

OTHER_POLICY = (
    "The engine's log-probs are far from the trainer's, so the samples come from a different policy: compare"
    " dtypes and versions."
)
NOT_WHOLE = (
    "The engine's log-probs are far from the trainer's right after a weight update: the weights arrived"
    " incomplete or wrong."
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
        "share of the loss's importance weights (one per token or per answer, by `sampler_is_level`) that the"
        " bounds changed or left out",
        "share",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sampler/masked_tokens sampler/masked_answers",
        "share of tokens that are left out of the loss, and share of answers that are left out as a whole",
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
        "effective sample size of these weights, as a share: 1 if all are equal; below 0.5 the answers"
        " effectively come from a different policy",
        "share",
        failed=OTHER_POLICY,
    ),
    Metric(
        "sync/probe_gap",
        "largest difference between the log-probs of engine and actor on fixed prompts right after a weight"
        " sync (for mixtures of experts in bf16: the 90th percentile)",
        "nats",
        failed=NOT_WHOLE,
    ),
    Metric(
        "sync/probe_bound",
        "largest such difference that rounding explains: 4 times the change in the actor's log-probs caused"
        " by noise of the size of rounding errors, but at least 0.001 in float32 and 0.02 in bfloat16",
        "nats",
        failed=NOT_WHOLE,
    ),
)
TIMES = (
    Metric(
        "phase/generate phase/score phase/credit phase/train phase/sync phase/probe",
        "wall-clock time of the phase per iteration; overlapped work counts only while the run waits for it",
        "s",
    ),
    Metric("phase/sleep phase/wake", "time for the engines to go to sleep, and to wake", "s", SLEEPS),
    Metric(
        "floor/generate floor/score floor/train",
        "lower bound of the phase's time, computed from the rates measured on the actor's GPU",
        "s",
    ),
    Metric(
        "work/ROLE/PHASE",
        "working time of a role's slowest rank in a phase of an iteration",
        "s",
        of=phases_of_roles,
    ),
    Metric(
        "memory/ROLE",
        "peak memory of PyTorch's tensors in an iteration, on the rank of the role that needs most; `/held`:"
        " peak that the allocator reserved; `/kept`: reserved at the end of the iteration",
        "GiB",
        of=after_run,
    ),
    Metric("wait/ROLE", "share of the iteration that a role spends waiting", "share", of=roles_of),
)
