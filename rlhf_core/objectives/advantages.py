"""Computes advantages from scores: KL estimates, token rewards, GAE, group estimators. No gradients.

Layout: the last dimension is time and a row is one document, so every function accepts one sample, (T,), or
padded samples, (B, T), but not packed rows. `mask` is True on response tokens and may have holes (text from a
tool or a user between them). Tokens off the mask are skipped, not zeroed: the token before a hole is followed
by the token after it, with one discount between them. Order: normalise, clip, estimate, whiten
(`masked.whiten`, over the whole rollout). Only the task's rewards are divided by a deviation. The KL is
subtracted from advantages afterwards, so that answers of equal reward learn no more than coefficient x KL.
GAE alone whitens both, since its critic predicts both. Group estimators take `scores` (G, n), n answers to
each of G prompts, and return one advantage per answer, (G, n). They raise ValueError for n < 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from rlhf_core.objectives.masked import masked_mean, whiten

KLEstimator = Literal["k1", "k2", "k3"]
RewardAt = Literal["last_token", "every_token"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates KL(policy || reference) per token from tokens that the policy sampled, in nats; shape of
    `logprobs`.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020,
    "Approximating KL divergence").
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d
        case _:
            assert_never(estimator)


def normalize_rewards(scores: Tensor, mean: float, std: float) -> Tensor:
    """Returns `(scores - mean) / std`, with the statistics stored with the reward model. Raises ValueError
    when `std` is not positive."""
    if not std > 0:
        raise ValueError(
            f"the reward model's stored score std is {std}: it gives every answer one score, train it again"
        )
    return (scores - mean) / std


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Returns `factor` times the soft overlong punishment of answers of `lengths` tokens (DAPO, Yu et al.
    2025, eq. 13).

    The punishment is 0 up to `limit - buffer` tokens, falls linearly to -1 at `limit`, and is -1 beyond;
    shape of `lengths`.
    """
    return factor * ((limit - buffer - lengths) / buffer).clamp(-1, 0)


def token_rewards(
    kl: Tensor,
    coef: float,
    scores: Tensor,
    mask: Tensor,
    at: RewardAt = "last_token",
    early: Tensor | None = None,
) -> Tensor:
    """Returns `-coef * KL_t + [t is the last response token] * score` (Ziegler et al. 2019, eq. 2, per
    token), (..., T); 0 off the mask.

    `kl` and `mask` (..., T), `scores` (...). With `every_token` each response token gets `score / |answer|`
    instead. A row without a response token gets 0. `early` (..., T): the parts of the score whose tokens
    are known; the last token also gets the rest.
    """
    response_left = mask.flip(-1).cumsum(-1).flip(-1)
    is_last = mask & (response_left == 1)
    if at == "last_token":
        paid = torch.where(is_last, (scores if early is None else scores - early.sum(-1))[..., None], 0)
        paid = paid if early is None else paid + early
    else:
        paid = torch.where(mask, (scores / mask.sum(-1).clamp(min=1))[..., None], 0)
    return torch.where(mask, -coef * kl, 0) + paid


class Credit(NamedTuple):
    """Holds advantages and value targets, (..., T), 0 off the mask."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float, after: Tensor | None = None
) -> Credit:
    """Computes generalised advantage estimation (Schulman et al. 2016, eq. 16). Inputs and results are
    (..., T); `values[t] = V(tokens[<t])`.

    `A_t = delta_t + gamma lambd A_next`, `delta_t = r_t + gamma V_next - V_t`, where next is the next
    response token and both are 0 after the last one. Returns are `A + V`, before whitening. `after` (...): V
    after the last response token, instead of 0, for an answer that a limit truncated (Pardo et al. 2018,
    "Time limits in reinforcement learning", eq. 6).
    """
    rows, places = np.nonzero(mask.reshape(-1, mask.shape[-1]).numpy())
    counts = np.bincount(rows, minlength=1)
    nth = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    # (response tokens, rows): for each token, the rows are contiguous in memory.
    reward, value, advantage = (
        np.zeros((counts.max() + 1, len(counts)), values.numpy().dtype) for _ in range(3)
    )
    reward[nth, rows], value[nth, rows] = (
        x.reshape(-1, x.shape[-1]).numpy()[rows, places] for x in (rewards, values)
    )
    if after is not None:
        last = np.maximum(counts - 1, 0), np.arange(len(counts))
        reward[last] += gamma * after.numpy().reshape(-1)[: len(counts)]
    delta = reward[:-1] + gamma * value[1:] - value[:-1]
    for t in reversed(range(len(delta))):
        advantage[t] = delta[t] + gamma * lambd * advantage[t + 1]
    found = np.zeros((mask.numel() // mask.shape[-1], mask.shape[-1]), value.dtype)
    found[rows, places] = advantage[nth, rows]
    advantages = torch.from_numpy(found).view(mask.shape)
    return Credit(advantages, torch.where(mask, advantages + values, 0))


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns `G_t = r_t + gamma G_next` over response tokens, (..., T): GAE with values 0 and lambda 1."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0).returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns `1 - Var(returns - values) / Var(returns)` over response tokens: 1 for a perfect critic, 0 for
    a constant one.

    When Var(returns) is 0 the result is nan or -inf.
    """
    error = returns - values
    variance = masked_mean((returns - masked_mean(returns, mask)).square(), mask)
    return 1 - masked_mean((error - masked_mean(error, mask)).square(), mask) / variance


# Critic-free estimators.


def grpo(scores: Tensor, eps: float = 1e-4) -> Tensor:
    """Returns `(r - mean) / (std + eps)` in each group (DeepSeekMath, Shao et al. 2024, section 4.1.2), with
    the sample std (n - 1). Equal scores give 0."""
    _check_group(scores)
    return (scores - scores.mean(-1, keepdim=True)) / (scores.std(-1, keepdim=True) + eps)


def dr_grpo(scores: Tensor) -> Tensor:
    """Returns `r - mean` in each group (Liu et al. 2025, "Understanding R1-Zero-like training")."""
    _check_group(scores)
    return scores - scores.mean(-1, keepdim=True)


def rloo(scores: Tensor) -> Tensor:
    """Returns `r - mean of the other answers` in each group (Ahmadian et al. 2024)."""
    _check_group(scores)
    n = scores.shape[-1]
    return scores - (scores.sum(-1, keepdim=True) - scores) / (n - 1)


# by the name that a recipe gives as advantage_estimator
GROUPED = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
# Estimators for the KL of answers. In place of grpo, which would divide the KL by a deviation, rloo: the mean
# of dr_grpo includes the answer's own KL, which would shrink it by 1 - 1 / n.
KL_ESTIMATORS = GROUPED | {"grpo": rloo}


class InGroups(NamedTuple):
    """Holds one advantage per answer (N,), and whether the answer was compared with another (N,)."""

    advantages: Tensor
    compared: Tensor


def in_groups(estimator: Callable[[Tensor], Tensor], scores: Tensor, scored: Tensor, n: int) -> InGroups:
    """Applies a group estimator to `scores` (N,), `n` consecutive answers per prompt, skipping answers that
    are not `scored`.

    An answer whose group has no other scored answer gets 0 and is not `compared`.
    """
    advantages = torch.zeros_like(scores)
    compared = torch.zeros_like(scored)
    for start in range(0, len(scores), n):
        members = start + scored[start : start + n].nonzero().flatten()
        if len(members) >= 2:
            # In float64 the mean of equal numbers is exact; in float32 it may be off, and its error would be
            # divided by a tiny deviation.
            advantages[members] = estimator(scores[members].double()).to(scores.dtype)
            compared[members] = True
    return InGroups(advantages, compared)


def gdpo(scores: Tensor, scored: Tensor, n: int, eps: float = 1e-4) -> InGroups:
    """Returns `(r - mean) / (std + eps)` over all answers that were compared (GDPO, Liu et al. 2026,
    arXiv:2601.05242), with the sample std: `scores` (N,), sums of rewards that are standardised within their
    groups, `n` consecutive answers per prompt.

    In the paper the mean of each group is 0. Here penalties may have moved it, so it is subtracted first.
    """
    centred, compared = in_groups(dr_grpo, scores, scored, n)
    if not compared.any():
        return InGroups(centred, compared)
    values = centred[compared].double()
    standard = (values - values.mean()) / (values.std() + eps)
    advantages = torch.zeros_like(centred)
    advantages[compared] = standard.to(centred.dtype)
    return InGroups(advantages, compared)


def reinforce_pp(
    rewards: Tensor, kl_costs: Tensor, mask: Tensor, gamma: float, whitened: bool = True
) -> Tensor:
    """Computes REINFORCE++ (Hu 2025): discounted returns of the task's token rewards, whitened over the whole
    rollout, minus the returns of `kl_costs`, coefficient x KL; all (..., T).

    The paper whitens the sum, which divides the KL by its own deviation when all rewards are equal. Here the
    KL's returns are only centred, and without whitening not even that.
    """
    returns = discounted_returns(rewards, mask, gamma)
    costs = discounted_returns(kl_costs, mask, gamma)
    if not whitened:
        return returns - costs
    return whiten(returns, mask) - torch.where(mask, costs - masked_mean(costs, mask), 0)


def _check_group(scores: Tensor) -> None:
    if scores.shape[-1] < 2:
        raise ValueError(
            "a group estimator compares answers to one prompt: set n_samples_per_prompt to 2 or more"
        )
