"""Changes what vLLM samples from: rows of the vocabulary that are no token, and the distributions of its warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

NEVER = -1e30  # a logit; finite, so that a row of nothing else has a softmax


def leave_out_padding(model: Any, known: int) -> None:
    """Makes a model of vLLM give every token from number `known` on a logit that has no probability, in samples and in log-probs.

    A method of all of vLLM's models, which both of its model runners call, computes the logits; on some ranks it returns None.
    """
    as_before = model.compute_logits

    def compute_logits(*states: Any, **named: Any) -> Any:
        logits = as_before(*states, **named)
        if logits is not None:
            logits[..., known:] = max(NEVER, torch.finfo(logits.dtype).min)
        return logits

    model.compute_logits = compute_logits


@contextmanager
def whole_distributions(sampler: Any) -> Iterator[None]:
    """Within the block `sampler` ignores top-k and top-p, which vLLM's largest batch asks for: their kernel takes ten seconds to compile at
    every start, and few runs use it. For these it is compiled at its first use."""
    if not hasattr(sampler, "topk_topp_sampler"):
        yield
        return
    as_before = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        return as_before(logits, replace(sampling_metadata, top_k=None, top_p=None), *others, **named)

    sampler.forward = forward
    try:
        yield
    finally:
        del sampler.forward
