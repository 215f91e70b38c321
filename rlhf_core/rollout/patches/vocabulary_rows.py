"""Leaves out rows of the vocabulary that are no token of the tokenizer."""

from __future__ import annotations

from typing import Any

import torch

NEVER = -1e30  # a logit; finite, so that a row of nothing else has a softmax


def leave_out_padding(model: Any, known: int) -> None:
    """Makes a model of vLLM give every token from number `known` on a logit that has no probability, in
    samples and in log-probs.

    A method of all of vLLM's models, which both of its model runners call, computes the logits; on some ranks
    it returns None.
    """
    as_before = model.compute_logits

    def compute_logits(*states: Any, **named: Any) -> Any:
        logits = as_before(*states, **named)
        if logits is not None:
            logits[..., known:] = max(NEVER, torch.finfo(logits.dtype).min)
        return logits

    model.compute_logits = compute_logits
