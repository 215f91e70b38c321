"""Computes losses and their metrics as pure functions of tensors.

Each takes a `denominator` counted over the whole optimiser step and all data-parallel ranks (tokens, pairs or
answers, as each loss states), and returns sums divided by it. Losses, gradients and metrics of micro-batches
and ranks therefore ADD UP to the values for the whole step, regardless of how the step was split, packed or
padded; an engine that averages gradients over ranks must multiply by the world size. All losses raise
ValueError when the denominator is not positive.

Shapes: per-token tensors are (B, T), where index t belongs to token t and `mask` is True on response tokens;
per-document tensors are (N,). Inputs are fp32 regardless of the model's dtype. Values off the mask, even inf
or nan, affect neither the loss nor its gradient. Running the model, reducing over documents (`masked`) and
choosing the algorithm are left to other modules.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_core.config.training.preference import PreferenceLoss
from rlhf_core.objectives.advantages import KLEstimator, kl_estimate
from rlhf_core.objectives.masked import document_mean, masked_sum


class Loss(NamedTuple):
    """A scalar to differentiate, and detached scalars to sum over micro-batches and ranks."""

    loss: Tensor
    metrics: dict[str, Tensor]


def _total(x: Tensor, denominator: float) -> Tensor:
    """Returns the sum of `x` divided by the denominator, or raises ValueError if that is not positive."""
    if not denominator > 0:
        raise ValueError(
            f"the loss's denominator is {denominator}: this optimiser step has no token or document to learn"
            " from"
        )
    return x.sum() / denominator


def _loss(terms: dict[str, Tensor], denominator: float) -> Loss:
    """Returns the total of the first term as the loss, and the totals of all terms as metrics."""
    totals = {name: _total(term, denominator) for name, term in terms.items()}
    return Loss(next(iter(totals.values())), {name: total.detach() for name, total in totals.items()})


def with_balance(loss: Loss, balance: Tensor | None, coef: float, documents: float) -> Loss:
    """Returns `loss` plus `coef * balance / documents`, the load-balancing loss of a mixture of experts
    (`models.experts`). Denominator: documents."""
    if balance is None:
        return loss
    mean = _total(balance, documents)
    return Loss(loss.loss + coef * mean, loss.metrics | {"router/balance": mean.detach()})


# Supervised and preference losses.


def sft_loss(logprobs: Tensor, mask: Tensor, denominator: float) -> Loss:
    """Returns the SFT loss, which is the NLL of the tokens under `mask`. Denominator: these tokens."""
    return _loss({"loss": -masked_sum(logprobs, mask)}, denominator)


def reward_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | float,
    centering: float,
    denominator: float,
) -> Loss:
    """Returns the Bradley-Terry loss `-log sigmoid(r_c - r_r - margin)` from scores (N,) (Ouyang et al. 2022,
    eq. 1; margin: Llama 2, eq. 2).

    It equals the log-exp loss `log(1 + exp(margin - (r_c - r_r)))`. The term `centering * (r_c + r_r)^2`
    keeps scores near 0 (Eisenstein et al. 2023). A tie counts as wrong in `accuracy`. Denominator: pairs.
    """
    difference = chosen_scores - rejected_scores
    loss = F.softplus(margin - difference) + centering * (chosen_scores + rejected_scores).square()
    return _loss(
        {
            "loss": loss,
            "accuracy": difference > 0,
            "margin": difference,
            "scores/chosen": chosen_scores,
            "scores/rejected": rejected_scores,
        },
        denominator,
    )


NO_SPREAD = 1e-6  # relative to the largest value: a standard deviation below this share is fp32 rounding
# these losses average log-probs over an answer's tokens; the other losses sum them
MEAN_LOGPROBS = ("ipo", "simpo", "orpo")


def preference_loss(
    config: PreferenceLoss,
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    denominator: float,
) -> Loss:
    """Returns the loss named by `config.loss` from the log-probs of responses, (N,). Denominator: pairs."""
    beta = config.beta or 0.1
    smoothing = config.label_smoothing
    match config.loss:
        case "sigmoid":
            return dpo_loss(
                chosen, rejected, ref_chosen, ref_rejected, beta, smoothing, "sigmoid", denominator
            )
        case "ipo" | "ipo_sum":
            return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, smoothing, "ipo", denominator)
        case "simpo":
            return simpo_loss(chosen, rejected, config.beta or 2.0, config.gamma, denominator)
        case "orpo":
            return orpo_loss(chosen, rejected, config.lambd, denominator)
        case _:
            assert_never(config.loss)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float,
    loss: Literal["sigmoid", "ipo"],
    denominator: float,
) -> Loss:
    """Returns the DPO loss from the log-probs of responses, (N,), with h = (pi_c - ref_c) - (pi_r - ref_r).

    sigmoid: `-log sigmoid(beta h)` with log-probs summed over tokens (Rafailov et al. 2023, eq. 7);
    `label_smoothing` is the probability that a label is flipped (cDPO, Mitchell 2023). ipo: `(h - 1 / (2
    beta))^2` with log-probs averaged over tokens (Azar et al. 2023, eq. 17, as the authors implement it).
    Denominator: pairs. Raises ValueError for ipo with `label_smoothing`.
    """
    reward_chosen = beta * (policy_chosen - ref_chosen)
    reward_rejected = beta * (policy_rejected - ref_rejected)
    if loss == "sigmoid":
        margin = reward_chosen - reward_rejected
        losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    elif label_smoothing == 0:
        h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
        losses = (h - 1 / (2 * beta)).square()
    else:
        raise ValueError("label_smoothing belongs to loss 'sigmoid' (cDPO): set it to 0 for 'ipo'")
    return _preference(losses, reward_chosen, reward_rejected, denominator)


def simpo_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, beta: float, gamma: float, denominator: float
) -> Loss:
    """Returns SimPO's loss, `-log sigmoid(beta (pi_c - pi_r) - gamma)`, from log-probs averaged over tokens,
    (N,) (Meng et al. 2024, eq. 6).

    Denominator: pairs. Usual values: beta 2, gamma 1.
    """
    losses = -F.logsigmoid(beta * (policy_chosen - policy_rejected) - gamma)
    return _preference(losses, beta * policy_chosen, beta * policy_rejected, denominator)


def orpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, lambd: float, denominator: float) -> Loss:
    """Returns ORPO's loss, `NLL_c - lambd log sigmoid(log odds_c - log odds_r)`, from log-probs averaged over
    tokens, (N,) (Hong et al. 2024, eq. 6-7).

    odds = p / (1 - p) with p = exp(mean log-prob). NLL_c is the negative mean log-prob, so every pair has the
    same weight. Denominator: pairs.
    """
    log_odds_ratio = _log_odds(policy_chosen) - _log_odds(policy_rejected)
    losses = -policy_chosen - lambd * F.logsigmoid(log_odds_ratio)
    return _preference(losses, lambd * policy_chosen, lambd * policy_rejected, denominator)


def kto_loss(
    policy_logps: Tensor,
    ref_logps: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float,
    w_desirable: float,
    w_undesirable: float,
    denominator: float,
) -> Loss:
    """Returns KTO's loss from log-probs summed over tokens, (N,), and `desirable` (N,) bool, with r = pi -
    ref (Ethayarajh et al. 2024, eq. 8).

    The loss is `w_d (1 - sigmoid(beta (r - KL)))` if desirable, otherwise `w_u (1 - sigmoid(beta (KL - r)))`.
    `kl` is one number for the whole optimiser step (the average over the mismatched pairs of all ranks); it
    is clamped at 0 and has no gradient. accuracy: fraction with r > KL if desirable, r < KL if not; margin:
    `beta |r - KL|`, negative when wrong. Denominator: answers.
    """
    kl = torch.as_tensor(kl, dtype=policy_logps.dtype, device=policy_logps.device).detach().clamp(min=0)
    signed = beta * (policy_logps - ref_logps - kl) * torch.where(desirable, 1, -1)
    losses = torch.where(
        desirable, w_desirable * torch.sigmoid(-signed), w_undesirable * torch.sigmoid(-signed)
    )
    return _loss(
        {"loss": losses, "accuracy": signed > 0, "margin": signed, "desirable": desirable}, denominator
    )


def _log_odds(logp: Tensor) -> Tensor:
    # A mean log-prob of exactly 0 (p rounds to 1 in fp32) has infinite odds, so clamp it below 0.
    logp = logp.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


def _preference(losses: Tensor, reward_chosen: Tensor, reward_rejected: Tensor, denominator: float) -> Loss:
    return _loss(
        {
            "loss": losses,
            "accuracy": reward_chosen > reward_rejected,
            "margin": reward_chosen - reward_rejected,
            "rewards/chosen": reward_chosen,
            "rewards/rejected": reward_rejected,
        },
        denominator,
    )


# Reinforcement learning.


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    is_weights: Tensor,
    denominator: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    cispo: bool = False,
) -> Loss:
    """Returns the loss `-w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`, PPO's clipped surrogate
    (Schulman et al. 2017, eq. 7).

    rho = exp(logprobs - old_logprobs), both from the trainer; w = `is_weights` (see `sampler_weights.py`;
    ones when off). With `dual_clip` c > 1, the objective of a token with A < 0 is at least c A (Ye et al.
    2020). With `cispo`, the objective is `sg(clip(rho)) A logprobs`, so that every token has a gradient
    (MiniMax-M1, 2025, eq. 4 and 5; its clip_low is 1). Denominator: response tokens. For GRPO's mean per
    answer, pass `weights` of 1/|answer| on its tokens and use the number of answers as denominator. For Dr.
    GRPO, the denominator is answers x a constant length, which also divides the metrics. clip_share: fraction
    of tokens without a gradient because of a clip (_low: rho < 1, _high: rho > 1); ratio_gap: |rho - 1|.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)
    advantages = torch.where(mask, advantages, 0)
    is_weights = torch.where(mask, is_weights, 0)
    counted = mask.to(log_ratio.dtype) if weights is None else torch.where(mask, weights, 0)

    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(surrogate, clipped * advantages)
    if cispo:
        surrogate = ratio
        objective = clipped  # used for clip_share
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    changed = objective != surrogate
    return _loss(
        {
            "policy/loss": (
                -counted
                * is_weights
                * (clipped.detach() * advantages * torch.where(mask, logprobs, 0) if cispo else objective)
            ),
            "policy/clip_share": counted * changed,
            "policy/clip_share_low": counted * (changed & (ratio < 1)),
            "policy/clip_share_high": counted * (changed & (ratio > 1)),
            "policy/ratio": counted * ratio,
            "policy/ratio_gap": counted * (ratio - 1).abs(),
        },
        denominator,
    )


def kl_from_old(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, denominator: float, weights: Tensor | None = None
) -> Tensor:
    """Returns the k3 estimate (Schulman 2020) of KL(old || new) at each token from its own log-ratio, all (B,
    T), in nats per token, without a gradient. `weights` and denominator: as in `policy_loss`."""
    log_ratio = torch.where(mask, logprobs.detach() - old_logprobs, 0)
    kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
    return _total(kl if weights is None else torch.where(mask, weights, 0) * kl, denominator)


def gspo_logprobs(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, documents: Tensor, num_documents: int
) -> Tensor:
    """Returns log-probs (B, T) whose ratio to `old_logprobs` is `s = exp(mean_t(logprobs - old_logprobs))` on
    all tokens of an answer, and whose gradient equals the gradient of each token's own log-prob.

    Passing them to `policy_loss` as `logprobs`, with `weights` of 1/|answer|, gives GSPO-token (Zheng et al.
    2025, eq. 13 to 17). If all tokens of an answer have the same advantage, the result has the value and
    gradient of GSPO (eq. 5 and 7). A gradient through the mean would average advantages that differ within an
    answer.
    """
    log_ratio = document_mean(logprobs - old_logprobs, mask, documents, num_documents).detach()
    own = logprobs - logprobs.detach()
    return torch.where(mask, old_logprobs + log_ratio[documents.clamp(min=0)] + own, 0)


def kl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    is_weights: Tensor,
    estimator: KLEstimator,
    denominator: float,
    weights: Tensor | None = None,
) -> Loss:
    """Returns the reverse KL to the reference as a loss, from (B, T) inputs. All arguments but `ref_logprobs`
    and `estimator` are as in `policy_loss`.

    The tokens come from the sampler, so each estimate is weighted by `is_weights` times rho = exp(logprobs -
    old_logprobs). The expected gradient is then the gradient of KL(policy || reference); rho is a constant
    for k2, but has a gradient for k3 (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation for RL"; DeepSeek-V3.2 2025, eq. 7). Unweighted k3 has the gradient of the forward KL. Raises
    ValueError for k1, whose expected gradient is zero.
    """
    if estimator not in ("k2", "k3"):
        raise ValueError(
            f"KL estimator {estimator!r} has no use as a loss (k1's expected gradient is zero): take k2 or k3"
        )
    gap = torch.where(mask, logprobs - ref_logprobs, 0)
    ratio = torch.where(mask, logprobs - old_logprobs, 0).exp()
    if estimator == "k2":
        ratio = ratio.detach()
    kl = torch.where(mask, is_weights, 0) * ratio * kl_estimate(gap, torch.zeros_like(gap), estimator)
    return _loss(
        {"policy/kl_loss": kl if weights is None else torch.where(mask, weights, 0) * kl}, denominator
    )


def teacher_loss(teacher_kl: Tensor, mask: Tensor, denominator: float, weights: Tensor | None = None) -> Loss:
    """Returns the mean of the KL to a teacher at each token, (B, T), in nats (GKD, Agarwal et al. 2024, on
    the student's answers). The KL is summed over the vocabulary, so it needs no importance weight. The other
    arguments are as in `policy_loss`."""
    counted = mask.to(teacher_kl.dtype) if weights is None else torch.where(mask, weights, 0)
    return _loss({"policy/teacher_kl": counted * torch.where(mask, teacher_kl, 0)}, denominator)


def entropy_loss(entropy: Tensor, mask: Tensor, denominator: float, weights: Tensor | None = None) -> Loss:
    """Returns the negative mean of the policy's entropy, (B, T), in nats. Adding it with a positive
    coefficient gives an entropy bonus.

    `weights` and denominator: as in `policy_loss`.
    """
    counted = mask.to(entropy.dtype) if weights is None else torch.where(mask, weights, 0)
    mean = _total(counted * torch.where(mask, entropy, 0), denominator)
    return Loss(-mean, {"policy/entropy": mean.detach()})


def value_clip_range(returns: Tensor, values: Tensor, mask: Tensor, clip: float) -> float:
    """Returns the clip range for `value_loss`: `clip` times the scale of the returns under the mask. Tensors:
    (B, T).

    The scale is the standard deviation of the returns, or the root mean square of their distance to the
    critic's `values` if that is larger, because a critic that starts far from nearly equal returns must be
    able to move. Pass the whole rollout of all ranks, because the scale of one rank or one micro-batch
    differs. Returns `clip` itself if the scale is no larger than rounding.
    """
    known = returns[mask].double()
    if not known.numel():
        return clip
    spread = float(known.std(correction=0))
    distance = float((known - values[mask].double()).square().mean().sqrt())
    scale = max(spread, distance)
    return clip * scale if scale > NO_SPREAD * float(known.abs().max()) else clip


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None, denominator: float
) -> Loss:
    """Returns the loss `0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`, as in OpenAI's
    PPO2; without a clip, `0.5 (V - R)^2`.

    Denominator: response tokens. clip_share: fraction of tokens whose clipped error is larger, so that they
    have no gradient.
    """
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    error = (values - returns).square()
    clipped_error = error
    if clip is not None:
        clipped_error = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    terms = {
        "value/loss": 0.5 * torch.maximum(error, clipped_error),
        "value/clip_share": clipped_error > error,
    }
    return _loss(terms, denominator)
