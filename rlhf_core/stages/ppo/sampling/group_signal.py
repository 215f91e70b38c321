"""Decides which groups of answers have a signal, and describes the groups that an iteration examined.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 11) trains only on groups whose rewards differ:
if all are equal, each advantage is 0. `sample_in_turn.py` and `group_filter.py` replace the other groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, combine
from rlhf_core.stages.ppo.rewards.shaped_rewards import shaped_rewards
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.sampled_answers import Setup

OF_KEPT = ("filter/reward_mean", "filter/reward_std", "filter/groups")  # metrics of the trained groups
MOST = 4  # most batches of prompts in a further round of filtering


class Looked(NamedTuple):
    """Holds all answers that filtering examined for an iteration, n consecutive answers per prompt, with
    their rewards. `accepted` is the number of groups with a signal, some of which may be left over. `rounds`
    is the number of sampling rounds."""

    rollouts: Sequence[Rollout]
    rewards: Rewards
    accepted: int
    rounds: int


def most_batches(rounds: int) -> int:
    """Returns the maximum number of batches of prompts that `rounds` rounds of filtering may examine: one in
    the first round, and MOST in each further one."""
    return 1 + MOST * (rounds - 1)


def rounds_of(batches: float) -> int:
    """Returns the number of rounds in which filtering may examine this many batches of prompts
    (`most_batches`), at least 1."""
    return 1 + math.ceil(max(batches - 1, 0) / MOST)


def looked_metrics(looked: Looked, statistics: Mapping[str, Running], setup: Setup) -> dict[str, float]:
    """Returns the metrics of all answers that were examined, so that a curve does not depend on which groups
    are kept. `statistics` include these answers."""
    everything = combine(looked.rewards.by_source, setup.terms, statistics, setup.sampling.n)
    metrics = everything.metrics | shaped_rewards(looked.rollouts, everything, setup.config).metrics
    return metrics | {
        "filter/rounds": float(looked.rounds),
        "filter/looked_at": len(looked.rollouts) / setup.sampling.n,
        "filter/accepted": looked.accepted * setup.sampling.n / len(looked.rollouts),
    }


def kept_metrics(kept: Rewards, statistics: Mapping[str, Running], setup: Setup) -> dict[str, float]:
    """Returns the metrics of the answers that are trained on. `statistics`: as in `looked_metrics`."""
    n = setup.sampling.n
    metrics = combine(kept.by_source, setup.terms, statistics, n).metrics
    found = {f"filter/reward_{name}": metrics[f"reward/{name}"] for name in ("mean", "std")}
    return found | {"filter/groups": len(kept) / n}


def no_signal(groups: int, rounds: int) -> str:
    """Returns the error sentence for an iteration without a group to train on."""
    return (
        f"dynamic_filtering: none of the {groups} groups of {rounds} rounds had answers of different reward:"
        " raise temperature or n_samples_per_prompt, take other prompts, or turn it off"
    )


def allowed_of(answers: int, setup: Setup) -> int:
    """Returns the number of `answers` on which a source may fail: the number allowed in an iteration, or the
    same fraction if there are more answers."""
    usual = setup.order.batch * setup.sampling.n
    return setup.allowed_failures * max(answers, usual) // usual


def check_failed(rewards: Rewards, setup: Setup) -> None:
    """Raises RewardsFailed if a source failed more often than is allowed (see `allowed_of`)."""
    rewards.check(allowed_of(len(rewards), setup))


def answers_with_signal(
    rollouts: Sequence[Rollout], rewards: Rewards, statistics: Mapping[str, Running], setup: Setup
) -> list[int]:
    """Returns the indices of the answers in groups with a signal (see `with_signal`).

    Compares rewards in the form used for training: standardised with `statistics`, clipped, and with
    penalties.
    """
    config = setup.config
    trainable = np.array([rollout.finished or not config.mask_truncated for rollout in rollouts])
    compared = trained_rewards(rollouts, rewards, statistics, setup)
    return with_signal(compared, setup.sampling.n, config.filter_min_spread, trainable)


def trained_rewards(
    rollouts: Sequence[Rollout], rewards: Rewards, statistics: Mapping[str, Running], setup: Setup
) -> np.ndarray:
    """Returns the rewards from which advantages are computed, (N,), nan for an answer without a reward."""
    if not np.isfinite(list(rewards.by_source.values())).all(0).any():
        return np.full(len(rollouts), np.nan)
    combined = combine(rewards.by_source, setup.terms, statistics, setup.sampling.n)
    shaped = shaped_rewards(rollouts, combined, setup.config)
    return np.where(combined.scored.numpy(), shaped.rewards.numpy(), np.nan)


def with_signal(
    rewards: np.ndarray, n: int, min_spread: float, trainable: np.ndarray | None = None
) -> list[int]:
    """Returns the indices of answers in groups with a signal. A group is `n` consecutive answers to one
    prompt. It has a signal if its rewards (nan: none) differ by more than `min_spread` and at least one
    answer is `trainable` (None: all are)."""
    chosen: list[int] = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        given = group[~np.isnan(group)]
        if trainable is not None and not trainable[start : start + n].any():
            continue
        if len(given) >= 2 and given.max() - given.min() > min_spread:
            chosen += range(start, start + n)
    return chosen
