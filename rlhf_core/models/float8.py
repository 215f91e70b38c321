"""Matrix products of large linear layers in float8 (Micikevicius et al. 2022, arXiv:2209.05433), by torchao.

Inputs and weights are rounded to E4M3, gradients to E5M2, each tensor with a scale of its own that is computed anew in every pass; products
are summed in float32. The weights that the optimiser steps, norms, attention, embeddings and the head stay as they are.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Weights below this many numbers are left: rounding their inputs takes longer than the product saves (H100, 16,384 tokens).
LARGE = 8_000_000


def multiply_in_float8(model: PreTrainedModel, large: int = LARGE) -> int:
    """Makes the linear layers of `model` with at least `large` weights multiply in float8; returns how many they are. Without a GPU the
    rounding is the same and products are in float32. Raises RuntimeError without torchao, or with a GPU that has no float8."""
    on_gpu = torch.cuda.is_available()
    if importlib.util.find_spec("torchao") is None:
        raise RuntimeError("float8 needs the package torchao: install it (it is in alignflow[gpu]), or leave float8 out")
    if on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError(f"float8 needs a GPU of compute capability 8.9 or more, {torch.cuda.get_device_name()} has less")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    heads = {id(getattr(model, "score", None)), id(model.get_output_embeddings())}

    def taken(part: nn.Module, name: str) -> bool:
        sides = getattr(part, "in_features", 1), getattr(part, "out_features", 1)
        return id(part) not in heads and sides[0] * sides[1] >= large and not any(side % 16 for side in sides)

    config: Any = replace(Float8LinearConfig.from_recipe_name("tensorwise"), pad_inner_dim=True, emulate=not on_gpu)
    convert_to_float8_training(model, config=config, module_filter_fn=taken)
    changed = [part for part in model.modules() if isinstance(part, Float8Linear)]
    for part in changed if on_gpu else []:
        part.compile()  # into few kernels: eager, the rounding takes longer than the products
    return len(changed)
