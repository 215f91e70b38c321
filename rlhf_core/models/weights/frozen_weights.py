"""Freezes weights that a recipe excludes from training, and finds layers, embeddings and heads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config.training.optimiser_fields import Freeze
from rlhf_core.models.weights.trained_encoder import TrainedEncoder


def freeze_weights(
    model: PreTrainedModel, freeze: Freeze, role: str = "model", trains_encoder: bool = False
) -> None:
    """Stops the weights named in `freeze` from being trained. Must be called before the model's optimiser is
    created. `role`: as in `Optimised.offloaded`. `trains_encoder`: whether an image encoder is trained too.

    Raises ValueError when part of `freeze` does not match any weight of this model, and when no weight is
    left to train. A critic, which may be a smaller model with another head, may lack some of these weights
    and freezes only the others.
    """
    told = model.name_or_path or type(model).__name__
    told = told if role == "model" else f"the {role} {told}"
    required = role != "critic"
    if freeze.embeddings:
        model.get_input_embeddings().requires_grad_(False)
    if freeze.layers:
        layers = layers_of(model)
        if required and freeze.layers > len(layers):
            raise ValueError(f"freeze.layers={freeze.layers}, and {told} has {len(layers)} layers: lower it")
        for layer in layers[: freeze.layers]:
            layer.requires_grad_(False)
    for pattern in freeze.names:
        weights = _named(model, pattern)
        if required and not weights:
            examples = ", ".join(name for name, _ in list(model.named_parameters())[-2:])
            raise ValueError(
                f"freeze.names: no weight of {told} is called {pattern!r}; its names are such as {examples}"
            )
        for weight in weights:
            weight.requires_grad_(False)
    if not trains_encoder and not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(f"freeze leaves no weight of {told} to train: freeze fewer")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers, or the longest list of modules if the model's code does not mark its
    layers."""
    named = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    return named or max(lists, key=len, default=[])


def _named(model: PreTrainedModel, pattern: str) -> list[nn.Parameter]:
    """Returns the weights that match a pattern. A tied weight is matched under each of its names."""
    expression = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    named = model.named_parameters(remove_duplicate=False)
    return [weight for name, weight in named if expression.fullmatch(name)]


def embeddings_and_heads(module: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of a `Policy` or `Scorer` that read or write tokens or scores: all embeddings,
    including the embeddings of a trained image encoder, the language model's head and a score head."""
    return set(_outer_weights(module))


def _outer_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield from part.parameters()
        if isinstance(part, TrainedEncoder):
            yield from part.embeddings
    model = getattr(module, "model", None)
    if isinstance(model, PreTrainedModel):
        heads = [model.get_output_embeddings(), getattr(model, "score", None)]
        for head in heads:
            if isinstance(head, nn.Module):
                yield from head.parameters()
