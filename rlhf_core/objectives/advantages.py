"""Computes advantages from scores: KL estimates, token rewards, GAE and group estimators. Nothing here has a
gradient.

Layout: the last dimension is time and each row is one document, so every function accepts one sample, (T,),
or padded samples, (B, T), but not packed rows. `mask` is True on response tokens and may have holes (text
from a tool or a user). Tokens outside the mask are skipped, not zeroed: the last token before a hole is
followed by the first token after it, with one discount between them.

The order of steps is normalise, clip, estimate, whiten (`masked.whiten`, over the whole rollout). Only the
task's rewards are divided by a standard deviation. The KL is subtracted from the advantages afterwards, so
that when all answers have the same reward, their advantages do not exceed coefficient x KL. Only GAE whitens
both together, since its critic predicts both. Group estimators take `scores` (G, n), n answers to each of G
prompts, and return one advantage per answer, (G, n). They raise ValueError for n < 2.
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
    """Returns an estimate of KL(policy || reference) at each token, in nats, from tokens sampled by the
    policy. The result has the shape of `logprobs`.

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
    """Returns `(scores - mean) / std`, using the statistics stored with the reward model. Raises ValueError
    when `std` is not positive."""
    if not std > 0:
        raise ValueError(
            f"the reward model's stored score std is {std}: it gives every answer one score, train it again"
        )
    return (scores - mean) / std


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """Returns the soft overlong punishment of answers of `lengths` tokens, multiplied by `factor` (DAPO, Yu
    et al. 2025, eq. 13).

    The punishment is 0 up to `limit - buffer` tokens, falls linearly to -1 at `limit`, and is -1 beyond. The
    result has the shape of `lengths`.
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
    """Returns `-coef * KL_t + [t is the last response token] * score` for each token (Ziegler et al. 2019,
    eq. 2), (..., T); 0 off the mask.

    `kl` and `mask` are (..., T), `scores` (...). With `every_token`, each response token gets `score /
    |answer|` instead. Rows without a response token are 0. `early` (..., T): the parts of the score that
    belong to particular tokens; the remainder goes to the last token.
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
    """Advantages and value targets, both (..., T) and 0 off the mask."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float, after: Tensor | None = None
) -> Credit:
    """Returns generalised advantage estimates (Schulman et al. 2016, eq. 16). Inputs and results are (...,
    T), and `values[t] = V(tokens[<t])`.

    `A_t = delta_t + gamma lambd A_next` and `delta_t = r_t + gamma V_next - V_t`, where next is the next
    response token; A_next and V_next are 0 after the last one. Returns are `A + V`, before whitening. `after`
    (...): V after the last response token, used instead of 0 for an answer that a limit truncated (Pardo et
    al. 2018, "Time limits in reinforcement learning", eq. 6).
    """
    rows, places = np.nonzero(mask.reshape(-1, mask.shape[-1]).numpy())
    counts = np.bincount(rows, minlength=1)
    nth = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    # (response tokens, rows): all rows of one token are contiguous in memory.
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
    """Returns `G_t = r_t + gamma G_next` over response tokens, (..., T): equal to GAE with values 0 and
    lambda 1."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0).returns


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns `1 - Var(returns - values) / Var(returns)` over response tokens: 1 for a perfect critic, 0 for
    a constant critic.

    The result is nan or -inf when Var(returns) is 0.
    """
    error = returns - values
    variance = masked_mean((returns - masked_mean(returns, mask)).square(), mask)
    return 1 - masked_mean((error - masked_mean(error, mask)).square(), mask) / variance


# Critic-free estimators.


def grpo(scores: Tensor, eps: float = 1e-4) -> Tensor:
    """Returns `(r - mean) / (std + eps)` in each group, with the sample std (n - 1) (DeepSeekMath, Shao et
    al. 2024, section 4.1.2). Equal scores give 0."""
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


# keyed by the value of advantage_estimator in a recipe
GROUPED = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
# Estimators for the KL of answers. grpo would divide the KL by a standard deviation, so rloo replaces it; not
# dr_grpo, whose mean includes the answer's own KL and would shrink it by 1 - 1 / n.
KL_ESTIMATORS = GROUPED | {"grpo": rloo}


class InGroups(NamedTuple):
    """One advantage per answer, (N,), and whether the answer was compared with another, (N,)."""

    advantages: Tensor
    compared: Tensor


def in_groups(estimator: Callable[[Tensor], Tensor], scores: Tensor, scored: Tensor, n: int) -> InGroups:
    """Returns the advantages that a group estimator gives for `scores` (N,), with `n` consecutive answers per
    prompt, skipping answers that are not `scored`.

    An answer with no other scored answer in its group gets 0 and is not `compared`.
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
    """Returns `(r - mean) / (std + eps)` over all answers that were compared, with the sample std (GDPO, Liu
    et al. 2026, arXiv:2601.05242).

    `scores` (N,): sums of rewards that were standardised within their groups, with `n` consecutive answers
    per prompt. In the paper the mean of each group is 0. Here penalties may have moved it, so it is
    subtracted first.
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
    """Returns the advantages of REINFORCE++ (Hu 2025): discounted returns of the task's token rewards,
    whitened over the whole rollout, minus the returns of `kl_costs`, which are coefficient x KL; all (...,
    T).

    The paper whitens the sum, which divides the KL by its own standard deviation when all rewards are equal.
    Here the KL's returns are only centred, and without whitening they are left unchanged.
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
