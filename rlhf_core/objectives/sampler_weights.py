"""Corrects for differences between trainer and sampler: computes importance weights, selects the tokens to
keep, and measures how far apart the two are.

Trainer and sampler use different kernels and precision, and the sampler may have older weights. With
`sampler_is_level`, an importance weight belongs either to a token or to a whole answer, whose tokens share
it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.objectives.masked import document_mean, document_sum

WeightLevel = Literal["token", "sequence", "geometric"]
SOME = 1_000_000  # most tokens used for a percentile; from more, every k-th is taken
# of a weight in a metric, e^69 = 1e30: a product over a long answer may overflow
LARGEST_LOG = 69.0


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    masked: bool = False,
    level: WeightLevel = "token",
    documents: Tensor | None = None,
) -> Tensor:
    """Returns importance weights `exp(old - sampler)` within [low, high], (B, T), 0 outside the mask, without
    a gradient.

    Weights outside the bounds are clamped ("TIS", Yao et al. 2025, with low 0), or set to 0 with `masked`
    ("IcePop", Ling team 2025). The weight of an answer is the product of its tokens' weights (sequence) or
    their geometric mean (geometric, like the ratio of GSPO, Zheng et al. 2025). Both need `documents` (B, T),
    the index of each token's document.
    """
    log_weights = torch.where(mask, old_logprobs - sampler_logprobs, 0).detach()
    if level != "token":
        assert documents is not None, "weights of answers need the documents of the tokens"
        reduce = document_sum if level == "sequence" else document_mean
        # an upper bound, since there are fewer documents than tokens
        of_documents = reduce(log_weights, mask, documents, documents.numel())
        log_weights = of_documents[documents.clamp(min=0)]
    return torch.where(mask, bounded(log_weights.exp(), low, high, masked), 0)


def bounded(weights: Tensor, low: float, high: float, masked: bool) -> Tensor:
    """Returns weights within [low, high]; weights outside are clamped, or set to 0 with `masked`."""
    if masked:
        return torch.where((weights >= low) & (weights <= high), weights, 0)
    return weights.clamp(low, high)


def sampler_weights(
    old: Tensor, sampler: Tensor | None, mask: Tensor, documents: Tensor, config: PPO
) -> Tensor:
    """Returns the importance weights that the recipe selects (see `importance_weights`). Without correction,
    they are 1 on the mask and `sampler` is not used."""
    if not config.weighs_tokens:
        return mask.to(old.dtype)
    assert sampler is not None, "the recipe asks for importance weights"
    bounds = config.sampler_is_bounds
    masked = config.sampler_is == "mask"
    return importance_weights(old, sampler, mask, *bounds, masked, config.sampler_is_level, documents)


def kept_tokens(old: np.ndarray, sampler: np.ndarray, mask: np.ndarray, config: PPO) -> np.ndarray:
    """Returns which tokens of one document the weights keep; all arrays are (T,). These are the tokens of
    `mask`, or with `sampler_is: mask` only the tokens whose weight is within the bounds."""
    if config.sampler_is != "mask":
        return mask
    one_document = torch.zeros(1, len(mask), dtype=torch.int64)
    old_row, sampler_row, mask_row = (torch.tensor(array)[None] for array in (old, sampler, mask))
    weights = sampler_weights(old_row, sampler_row, mask_row, one_document, config)
    return np.asarray(weights[0] > 0)


def percentile(values: Tensor, percent: float) -> float:
    """Returns a percentile of `values` (N,), using every k-th value if there are more than `SOME`."""
    return float(np.percentile(values[:: 1 + len(values) // SOME].numpy(), percent))


def sampler_metrics(gaps: Tensor, lengths: Tensor, config: PPO) -> dict[str, float]:
    """Measures the distance between trainer and sampler.

    `gaps` (N,): the trainer's log-prob minus the sampler's, in nats, for the response tokens of one answer
    after another; `lengths`: the number of tokens of each answer. gap: mean |gap|; ratio_gap: mean |exp(gap)
    - 1|; gap_p99: 99th percentile of |gap|. The other metrics describe the loss's weights, one per token or
      per answer, depending on `sampler_is_level`. capped: the fraction of weights that the bounds clamped or
      set to 0;
    weight_mean;
    weight_max: before the bounds apply; ess: effective sample size `(sum w)^2 / (n sum w^2)` (Kish 1965), 1
    if all are equal. With `sampler_is: mask`, also the fractions of tokens and of whole answers that the loss
    leaves out.
    """
    distances = gaps.abs()
    metrics = {
        "sampler/gap": float(distances.mean(dtype=torch.float64)),
        "sampler/ratio_gap": float(torch.expm1(gaps).abs().mean(dtype=torch.float64)),
        "sampler/gap_p99": percentile(distances, 99),
    }
    weights = _of_level(gaps, lengths, config.sampler_is_level).clamp(max=LARGEST_LOG).exp()
    used = torch.ones_like(weights)
    if config.weighs_tokens:
        used = bounded(weights, *config.sampler_is_bounds, config.sampler_is == "mask")
    low, high = config.sampler_is_bounds
    cut = ((weights < low) | (weights > high)) & config.weighs_tokens
    total = used.sum(dtype=torch.float64)
    squares = used.double().square().sum()
    if config.sampler_is == "mask":
        metrics |= _left_out(cut, lengths, config.sampler_is_level)
    return metrics | {
        "sampler/capped": float(cut.double().mean()),
        "sampler/weight_mean": float(total / len(used)),
        "sampler/weight_max": float(weights.max()),
        "sampler/ess": float(total.square() / (len(used) * squares)) if squares > 0 else 0.0,
    }


def _left_out(cut: Tensor, lengths: Tensor, level: WeightLevel) -> dict[str, float]:
    """Returns the fraction of tokens that are `cut`, and the fraction of answers that are cut completely.
    `cut` has one value per token, or one per answer that has tokens."""
    lengths = lengths[lengths > 0]
    tokens = cut if level == "token" else cut.repeat_interleave(lengths)
    answers = torch.segment_reduce(tokens.double(), "min", lengths=lengths)
    return {
        "sampler/masked_tokens": float(tokens.double().mean()),
        "sampler/masked_answers": float(answers.mean()),
    }


def _of_level(gaps: Tensor, lengths: Tensor, level: WeightLevel) -> Tensor:
    """Returns the log-weights of all tokens or all answers, depending on `level`."""
    if level == "token":
        return gaps
    reduction = "sum" if level == "sequence" else "mean"
    return torch.segment_reduce(gaps.double(), reduction, lengths=lengths[lengths > 0])
