"""Activations recomputed in the backward pass in place of kept (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute(model: PreTrainedModel, share: float) -> None:
    """The first `share` of the layers keep only their input: time for memory, layer by layer. 0 keeps everything."""
    if not share:
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False
