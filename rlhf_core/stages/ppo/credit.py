"""From scores to experience: rewards summed and shaped, advantages, importance weights. Runs on the driver; a few MB, no model.

Answers that a reward source failed on, and answers without another one to be compared with, are masked out here: they touch no statistic,
and training skips them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import AdvantageEstimator
from rlhf_core.objectives.advantages import (
    GROUPED,
    Credit,
    KLEstimator,
    RewardAt,
    clip_rewards,
    dr_grpo,
    explained_variance,
    gae,
    in_groups,
    kl_estimate,
    overlong_penalty,
    reinforce_pp,
    spread,
    token_rewards,
)
from rlhf_core.objectives.losses import importance_weights, sampler_metrics
from rlhf_core.objectives.masked import masked_mean, whiten
from rlhf_core.rewards.combine import Running, Term, combine
from rlhf_core.stages.ppo.records import Experience, Rollout, Scores


class Overlong(NamedTuple):
    """The soft length penalty: `limit` and `buffer` in tokens, `factor` at the limit."""

    limit: int
    buffer: int
    factor: float


class Shaping(NamedTuple):
    """The settings of the credit; see `config.PPO`. `n` consecutive answers per prompt."""

    estimator: AdvantageEstimator
    n: int
    terms: Sequence[Term]
    reward_clip: float
    reward_at: RewardAt
    overlong: Overlong | None
    kl_estimator: KLEstimator
    kl_in: Literal["reward", "loss"]
    gamma: float
    lambd: float
    whiten: bool
    is_bounds: tuple[float, float]
    is_weighted: bool


class Credited(NamedTuple):
    """Experience of all rollouts, the indices of those to train on, the mean KL per token (nats) the controller steers by, the running
    statistics of rewards, and metrics."""

    experience: list[Experience]
    usable: list[int]
    kl: float
    statistics: dict[str, Running]
    metrics: dict[str, float]


def credit(rollouts: Sequence[Rollout], scores: Scores, kl_coef: float, statistics: Mapping[str, Running], shaping: Shaping) -> Credited:
    """Advantages and returns of a whole rollout. Statistics are taken over all its usable response tokens at once."""
    lengths = [len(rollout.document.tokens) for rollout in rollouts]
    response = _pad([np.asarray(rollout.document.mask) for rollout in rollouts], torch.bool)  # (B, T)
    logprobs, ref_logprobs, values = _pad(scores.logprobs), _pad(scores.ref_logprobs), _pad(scores.values)
    sampler_logprobs = _pad([rollout.sampler_logprobs for rollout in rollouts])

    combined = combine(scores.rewards.by_source, shaping.terms, statistics)
    rewards, metrics = clip_rewards(combined.rewards, shaping.reward_clip), dict(combined.metrics)
    if shaping.overlong is not None:
        penalty = overlong_penalty(response.sum(-1), *shaping.overlong)
        rewards, metrics["reward/overlong"] = rewards + penalty, float(penalty.mean())

    mask = response & combined.scored[:, None]
    kl = torch.where(mask, kl_estimate(logprobs, ref_logprobs, shaping.kl_estimator), 0)
    coef = kl_coef if shaping.kl_in == "reward" else 0.0
    (advantages, returns), usable = estimate(rewards, kl, coef, values, mask, combined.scored, shaping)
    mask &= usable[:, None]
    if not mask.any():
        raise ValueError(f"none of the {len(rollouts)} answers can be learned from: each prompt needs two answers with a reward")
    low, high = shaping.is_bounds
    weights = importance_weights(logprobs, sampler_logprobs, low, high) if shaping.is_weighted else torch.ones_like(logprobs)
    weights = torch.where(mask, weights, 0)

    metrics |= {
        "kl/mean": float(masked_mean(kl, mask)),
        "kl/per_answer": float(kl[usable].sum(-1).mean()),
        "kl/coef": kl_coef,
        "return/mean": float(masked_mean(returns, mask)),
        "response/length": float(response.sum(-1).float().mean()),
        "response/truncated": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
        "rollout/usable": float(usable.float().mean()),
    }
    if shaping.estimator == "gae":
        metrics["value/explained_variance"] = float(explained_variance(values, returns, mask).nan_to_num(0.0))
    gaps = sampler_metrics(logprobs, sampler_logprobs, response, low, high, float(response.sum()))
    metrics |= {name: float(value) for name, value in gaps.items()}
    metrics["sampler/gap_p99"] = float(np.percentile((logprobs - sampler_logprobs).abs()[response].numpy(), 99))

    cut = zip(_cut(advantages, lengths), _cut(returns, lengths), _cut(weights, lengths), strict=True)
    scored = zip(rollouts, scores.logprobs, scores.ref_logprobs, scores.values, strict=True)
    experience = [Experience(r.document, old, ref, v, *arrays) for (r, old, ref, v), arrays in zip(scored, cut, strict=True)]
    return Credited(experience, usable.nonzero().flatten().tolist(), metrics["kl/mean"], combined.statistics, metrics)


class Estimated(NamedTuple):
    """Advantages and returns (B, T), and which answers have them (B,)."""

    credit: Credit
    usable: Tensor


def estimate(rewards: Tensor, kl: Tensor, coef: float, values: Tensor, mask: Tensor, scored: Tensor, shaping: Shaping) -> Estimated:
    """Advantages by the configured estimator: `rewards` and `scored` (B,), `kl`, `values` and `mask` (B, T), `coef` of the KL.

    Where an estimator is defined on whole answers, the KL of all tokens leaves the answer's reward (Ahmadian et al. 2024, eq. 1).
    """
    gamma = shaping.gamma

    def per_token(scores: Tensor) -> Tensor:
        return token_rewards(kl, coef, scores, mask, shaping.reward_at)

    match shaping.estimator:
        case "gae":
            advantages, returns = gae(per_token(rewards), values, mask, gamma, shaping.lambd)
            return Estimated(Credit(whiten(advantages, mask) if shaping.whiten else advantages, returns), scored)
        case "reinforce_pp":
            advantages = reinforce_pp(per_token(rewards), mask, gamma)
            return Estimated(Credit(advantages, advantages), scored)
        case "reinforce_pp_baseline":
            centred, compared = in_groups(dr_grpo, rewards, scored, shaping.n)
            advantages = reinforce_pp(per_token(centred), mask & compared[:, None], gamma)
            return Estimated(Credit(advantages, advantages), compared)
        case grouped:  # the rest compare the answers to one prompt
            of_answers, compared = in_groups(GROUPED[grouped], rewards - coef * kl.sum(-1), scored, shaping.n)
            advantages = spread(of_answers, mask)
            return Estimated(Credit(advantages, advantages), compared)


def _pad(rows: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
    """Ragged (T_i,) rows to (B, T), zeros behind."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.from_numpy(np.array(row))  # a copy: what Ray delivers is read-only
    return padded


def _cut(padded: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [row[:length].numpy() for row, length in zip(padded, lengths, strict=True)]
