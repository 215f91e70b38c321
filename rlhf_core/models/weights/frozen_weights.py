"""Freezes weights that a recipe excludes from training, and finds embeddings and heads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.config.training.optimiser_fields import Freeze


def freeze_weights(model: PreTrainedModel, freeze: Freeze) -> None:
    """Takes the gradient from the weights that `freeze` names. Call it before the model's optimiser is made.

    Raises ValueError when a part of `freeze` names nothing in this model, and when nothing is left to train.
    """
    if freeze.embeddings:
        model.get_input_embeddings().requires_grad_(False)
    if freeze.layers:
        for layer in _first_layers(model, freeze.layers):
            layer.requires_grad_(False)
    for pattern in freeze.names:
        _freeze_pattern(model, pattern)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(f"freeze leaves no weight of {_told(model)} to train: freeze fewer")


def _first_layers(model: PreTrainedModel, count: int) -> list[nn.Module]:
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if count > len(layers):
        raise ValueError(f"freeze.layers={count}, and {_told(model)} has {len(layers)} layers: lower it")
    return layers[:count]


def _freeze_pattern(model: PreTrainedModel, pattern: str) -> None:
    expression = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    # both names of tied weights
    named = model.named_parameters(remove_duplicate=False)
    weights = [weight for name, weight in named if expression.fullmatch(name)]
    if not weights:
        examples = ", ".join(name for name, _ in list(model.named_parameters())[-2:])
        raise ValueError(
            f"freeze.names: no weight of {_told(model)} is called {pattern!r}; its names are such"
            f" as {examples}"
        )
    for weight in weights:
        weight.requires_grad_(False)


def _told(model: PreTrainedModel) -> str:
    return model.name_or_path or type(model).__name__


def embeddings_and_heads(module: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of a `Policy` or `Scorer` that read or write tokens or scores: those of all
    embeddings, of the language model's head and of a score head."""
    return set(_outer_weights(module))


def _outer_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield from part.parameters()
    model = getattr(module, "model", None)
    if isinstance(model, PreTrainedModel):
        heads = [model.get_output_embeddings(), getattr(model, "score", None)]
        for head in heads:
            if isinstance(head, nn.Module):
                yield from head.parameters()
