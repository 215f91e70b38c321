"""Computes the actor's loss: clipped surrogate, KL and entropy terms, averaged over tokens or answers. All
functions are pure functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO, Aggregation
from rlhf_core.objectives.losses import (
    Loss,
    entropy_loss,
    gspo_logprobs,
    kl_from_old,
    kl_loss,
    policy_loss,
    teacher_loss,
)
from rlhf_core.objectives.masked import document_sum


class ResponseCounts(NamedTuple):
    """The numbers of response tokens and answers of one optimiser step, over all ranks."""

    tokens: float
    answers: float


class PerToken(NamedTuple):
    """A micro-batch of tensors, all (B, T): the policy's log-probs and entropy, log-probs before the update
    and under the reference, advantages, importance weights, the mask of trained tokens, document indices, and
    the KL to a teacher."""

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    is_weights: Tensor
    mask: Tensor
    documents: Tensor
    teacher_kl: Tensor | None = None


def count(masks: Sequence[np.ndarray]) -> ResponseCounts:
    """Counts the tokens and answers that an optimiser step trains on. `masks`: (T,), one per document.
    Answers without tokens are not counted; an empty step counts as one token and one answer, so that its loss
    is 0."""
    lengths = [np.count_nonzero(mask) for mask in masks]
    return ResponseCounts(max(float(sum(lengths)), 1.0), max(float(np.count_nonzero(lengths)), 1.0))


def denominator(aggregation: Aggregation, counted: ResponseCounts, constant_length: int) -> float:
    """Returns the divisor of a sum over an optimiser step: the number of its tokens, of its answers, or of
    its answers times a constant (Dr. GRPO)."""
    match aggregation:
        case "token":
            return counted.tokens
        case "sequence":
            return counted.answers
        case "constant":
            return counted.answers * constant_length


def actor_loss(x: PerToken, num_documents: int, counted: ResponseCounts, config: PPO, kl_coef: float) -> Loss:
    """Returns `policy_loss + kl_coef * KL - entropy_coef * entropy`, with one denominator for all terms.

    Metrics: fractions and ratios are means over tokens, or over answers with aggregation `sequence`;
    policy/kl_old is computed per token even with `ratio: sequence`. Raises ValueError when the step has no
    response token or answer.
    """
    divisor = denominator(config.aggregation, counted, config.generate_max_len)
    weights = None
    if config.aggregation == "sequence":
        lengths = document_sum(torch.ones_like(x.logprobs), x.mask, x.documents, num_documents)
        weights = torch.where(x.mask, 1 / lengths.clamp(min=1)[x.documents.clamp(min=0)], 0)
    new = x.logprobs
    if config.ratio == "sequence":
        new = gspo_logprobs(x.logprobs, x.old_logprobs, x.mask, x.documents, num_documents)
    cispo = config.policy_loss == "cispo"
    surrogate = policy_loss(
        new,
        x.old_logprobs,
        x.advantages,
        x.mask,
        *config.clips,
        x.is_weights,
        divisor,
        config.dual_clip,
        weights,
        cispo,
    )
    entropy = entropy_loss(x.entropy, x.mask, divisor, weights)
    loss = surrogate.loss
    moved = kl_from_old(x.logprobs, x.old_logprobs, x.mask, divisor, weights)
    metrics = surrogate.metrics | entropy.metrics | {"policy/kl_old": moved}
    if x.teacher_kl is not None:
        kl = teacher_loss(x.teacher_kl, x.mask, divisor, weights)
        loss = loss + kl_coef * kl.loss
        metrics = metrics | kl.metrics
    elif config.kl_in == "loss" and x.ref_logprobs is not None:
        kl = kl_loss(
            x.logprobs,
            x.old_logprobs,
            x.ref_logprobs,
            x.mask,
            x.is_weights,
            config.kl_estimator,
            divisor,
            weights,
        )
        loss = loss + kl_coef * kl.loss
        metrics = metrics | kl.metrics
    if config.entropy_coef:
        loss = loss + config.entropy_coef * entropy.loss
    # Dr. GRPO's constant applies only to the loss; metrics are means over tokens.
    readable = divisor / counted.tokens if config.aggregation == "constant" else 1.0
    return Loss(
        loss, {name: value if name == "policy/loss" else value * readable for name, value in metrics.items()}
    )
