"""From scores to experience: shaped rewards, GAE, whitening, importance weights. Runs on the driver; a few MB, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.advantages import KLEstimator, clip_rewards, explained_variance, gae, kl_estimate, normalize_rewards, token_rewards
from rlhf_core.losses import importance_weights, sampler_metrics
from rlhf_core.masked import masked_mean, whiten
from rlhf_core.ppo.types import Experience, Rollout, Scores


class Shaping(NamedTuple):
    """The knobs of the credit; see `config.PPO`. `mean` and `std` are the reward model's stored statistics, or None."""

    kl_estimator: KLEstimator
    gamma: float
    lambd: float
    reward_clip: float
    statistics: tuple[float, float] | None
    whiten: bool
    is_cap: float


class Credited(NamedTuple):
    """Experience of all rollouts, the mean KL per token (nats) the controller steers by, and metrics."""

    experience: list[Experience]
    kl: float
    metrics: dict[str, float]


def credit(rollouts: Sequence[Rollout], scores: Scores, kl_coef: float, shaping: Shaping) -> Credited:
    """Advantages and returns of a whole rollout. Statistics are taken over all its response tokens at once."""
    lengths = [len(rollout.document.tokens) for rollout in rollouts]
    mask = _pad([np.asarray(rollout.document.mask) for rollout in rollouts], torch.bool)  # (B, T)
    logprobs, ref_logprobs, values = _pad(scores.logprobs), _pad(scores.ref_logprobs), _pad(scores.values)
    sampler_logprobs = _pad([rollout.sampler_logprobs for rollout in rollouts])
    raw = torch.from_numpy(scores.rewards).float()
    rewards = clip_rewards(normalize_rewards(raw, *shaping.statistics) if shaping.statistics else raw, shaping.reward_clip)

    kl = torch.where(mask, kl_estimate(logprobs, ref_logprobs, shaping.kl_estimator), 0)
    shaped = token_rewards(kl, kl_coef, rewards, mask)
    advantages, returns = gae(shaped, values, mask, shaping.gamma, shaping.lambd)
    variance_explained = explained_variance(values, returns, mask)
    if shaping.whiten:
        advantages = whiten(advantages, mask)
    weights = torch.where(mask, importance_weights(logprobs, sampler_logprobs, shaping.is_cap), 0)

    response = mask.sum(-1).float()
    metrics = {
        "reward/mean": float(raw.mean()),
        "reward/std": float(raw.std(correction=0)),
        "kl/mean": float(masked_mean(kl, mask)),
        "kl/per_answer": float(kl.sum(-1).mean()),
        "kl/coef": kl_coef,
        "return/mean": float(masked_mean(returns, mask)),
        "value/explained_variance": float(variance_explained.nan_to_num(0.0)),
        "response/length": float(response.mean()),
        "response/truncated": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
    }
    gaps = sampler_metrics(logprobs, sampler_logprobs, mask, shaping.is_cap, float(mask.sum()))
    metrics |= {name: float(value) for name, value in gaps.items()}
    parts = zip(
        rollouts, scores.logprobs, scores.values, _cut(advantages, lengths), _cut(returns, lengths), _cut(weights, lengths), strict=True
    )
    experience = [Experience(rollout.document, old, value, a, r, w) for rollout, old, value, a, r, w in parts]
    return Credited(experience, metrics["kl/mean"], metrics)


def _pad(rows: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
    """Ragged (T_i,) rows to (B, T), zeros behind."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.from_numpy(np.array(row))  # a copy: what Ray delivers is read-only
    return padded


def _cut(padded: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [row[:length].numpy() for row, length in zip(padded, lengths, strict=True)]
