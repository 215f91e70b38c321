"""Excludes vocabulary rows that do not correspond to tokens of the tokenizer."""

from __future__ import annotations

from typing import Any

import torch

NEVER = -1e30  # a logit; finite, so that softmax works even if all logits have this value


def leave_out_padding(model: Any, known: int) -> None:
    """Makes a vLLM model give every token from `known` on a logit with zero probability, both in samples and
    in log-probs.

    It wraps `compute_logits`, which all vLLM models have and both model runners call; on some ranks this
    returns None.
    """
    as_before = model.compute_logits

    def compute_logits(*states: Any, **named: Any) -> Any:
        logits = as_before(*states, **named)
        if logits is not None:
            logits[..., known:] = max(NEVER, torch.finfo(logits.dtype).min)
        return logits

    model.compute_logits = compute_logits
