"""Makes feed-forward blocks compute only part of the tokens at a time, for long passes.

A block's inner activations are several times as wide as the hidden states, and all of them exist at once when
a layer is recomputed for the backward pass. Here the activations of only one part of the tokens exist at a
time, each recomputed for its own gradient (like the tiled MLPs of Bekman et al. 2025, "Arctic Long Sequence
Training"). Experts stay unchanged, because they compute one product over all tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def split_feed_forward(model: PreTrainedModel, tokens: int) -> None:
    """Makes the model's dense feed-forward blocks compute at most `tokens` of each row at a time. Raises
    ValueError when it has no such blocks."""
    dense = [
        part
        for name, part in model.named_modules()
        if type(part).__name__.endswith("MLP") and ".experts." not in f".{name}."
    ]
    blocks = [block for block in dense if _inputs(block) == 1]  # BLOOM's blocks also take the residual
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no feed-forward block that could be computed in parts: leave"
            " mlp_tokens out"
        )
    # The engine may reduce the gradients of a block's adapters together with that of its input, which would
    # have none above frozen embeddings.
    model.enable_input_require_grads()
    for block in blocks:
        block.forward = partial(_in_parts, block.forward, tokens)


def _inputs(block: nn.Module) -> int:
    return sum(given.default is given.empty for given in inspect.signature(block.forward).parameters.values())


def is_split(block: nn.Module) -> bool:
    """Returns whether the block computes its tokens in parts, the number of which may differ between
    ranks."""
    return getattr(vars(block).get("forward"), "func", None) is _in_parts


def _in_parts(forward: Callable[[Tensor], Tensor], tokens: int, hidden: Tensor) -> Tensor:
    """Computes (..., T, H) -> (..., T, H), at most `tokens` at a time."""
    if hidden.shape[-2] <= tokens:
        return forward(hidden)
    parts = hidden.split(tokens, -2)
    if not torch.is_grad_enabled():
        return torch.cat([forward(part) for part in parts], -2)
    return torch.cat(
        [checkpoint(forward, part, use_reentrant=False, preserve_rng_state=False) for part in parts], -2
    )
