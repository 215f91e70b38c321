"""Provides Muon (Jordan et al. 2024), the optimiser of hidden matrices, in PyTorch's implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.models.weights.frozen_weights import embeddings_and_heads

MOMENTUM = 0.95  # with a Nesterov update, as in both papers


def hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Returns the trained matrices in the layers of a `Policy` or `Scorer`, including routers. Experts stored
    in one 3-D tensor are excluded, because PyTorch's Muon rejects such tensors.

    Raises ValueError when there are none.
    """
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    # excludes matrices that are not used in a product, such as Mamba's A_log
    inside = {
        weight
        for layer in layers
        for name, weight in layer.named_parameters()
        if name.endswith("weight") and weight.ndim == 2
    }
    found = {weight for weight in inside - embeddings_and_heads(module) if weight.requires_grad}
    if not found:
        raise ValueError(
            f"optimizer=muon trains the matrices of a model's layers, and {type(module).__name__} has none"
            " that are trained: set optimizer to adamw"
        )
    return found


def muon_optimizer(matrices: Sequence[Tensor], weight_decay: float) -> torch.optim.Muon:
    """Returns Muon scaled to AdamW's update size: it multiplies the orthogonal matrix by 0.2 * sqrt(longer
    side), so that one learning rate and weight decay suit both (Liu et al. 2025, arXiv:2502.16982, equation
    4)."""
    return torch.optim.Muon(
        matrices, lr=0.0, weight_decay=weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
