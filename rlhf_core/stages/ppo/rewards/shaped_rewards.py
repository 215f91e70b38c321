"""Turns the sum of all sources into the rewards from which advantages are computed: clips it and adds length
penalties. `group_signal.py` filters groups by the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.objectives.advantages import overlong_penalty
from rlhf_core.rewards.combine import Combined
from rlhf_core.stages.ppo.rollout_records import Rollout


class Shaped(NamedTuple):
    """Holds the rewards (B,), which are 0 for answers without a reward, and metrics. `clipped` (B,) holds the
    rewards before penalties. `penalties` (B,) holds the added penalties, keyed by the names of their
    metrics."""

    rewards: Tensor
    clipped: Tensor
    metrics: dict[str, float]
    penalties: Mapping[str, Tensor]


def shaped_rewards(
    rollouts: Sequence[Rollout], combined: Combined, config: PPO, of_cut: Tensor | float = 0.0
) -> Shaped:
    """Returns the shaped rewards. Clips the sums to `reward_clip`, replaces the sums of truncated answers
    with `of_cut` if `bootstrap_truncated`, and adds penalties."""
    limit = config.reward_clip
    clipped = combined.rewards.clamp(-limit, limit)
    metrics = {"reward/clipped": float((combined.rewards.abs() > limit).float().mean())}
    cut = truncated(rollouts)
    rewards = torch.where(cut, of_cut, clipped) if config.bootstrap_truncated else clipped
    penalties = penalties_of(rollouts, cut, config)
    for name, penalty in penalties.items():
        rewards = rewards + penalty
        metrics[f"reward/{name}"] = float(penalty.mean())
    return Shaped(rewards, clipped, metrics, penalties)


def truncated(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns whether a limit ended each answer or episode, (B,) bool."""
    return torch.tensor([not rollout.finished for rollout in rollouts])


def used_tokens(rollout: Rollout, config: PPO) -> int:
    """Returns how many of the `generate_max_len` tokens an answer or episode has used. The conversations of
    an episode share `prompt_max_len` + `generate_max_len` tokens."""
    document = rollout.document
    return len(document) - (config.prompt_max_len if document.starts else document.answer_start)


def penalties_of(rollouts: Sequence[Rollout], cut: Tensor, config: PPO) -> dict[str, Tensor]:
    """Returns the penalties to add to the rewards, (B,) each, keyed by the name of their metric. `cut` (B,)
    says whether a limit ended the answer or episode."""
    found = dict[str, Tensor]()
    if config.overlong_buffer:
        used = torch.tensor([used_tokens(rollout, config) for rollout in rollouts])
        limit = config.generate_max_len
        buffer = config.overlong_buffer
        factor = config.overlong_penalty
        found["overlong"] = overlong_penalty(used, limit, buffer, factor)
    if config.truncated_penalty:
        found["truncated"] = -config.truncated_penalty * cut.float()
    return found
