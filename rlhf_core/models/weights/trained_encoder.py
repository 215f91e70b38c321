"""Trains an image encoder, or only its projector, together with the language model.

The trained weights are a part of the trained module; the encoder that computes with them is not, because
ranks run its layers a different number of times, once for each image in some families. Each pass calls
`TrainedEncoder` once, and in it every weight gets a gradient, which is zero in a pass without images. All
ranks therefore gather weights and sum gradients in the same order, regardless of the contents of their
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Inputs = Mapping[str, Tensor]
Encode = Callable[[Inputs], Tensor]


class TrainedEncoder(nn.Module):
    """Holds the trained weights of an encoder. `stored`: these weights by their names in the checkpoint.
    `embeddings`: the weights that are embeddings, such as position embeddings. `encode`: computes features
    from the inputs of the encoder, with these weights."""

    def __init__(self, stored: Mapping[str, nn.Parameter], embeddings: list[nn.Parameter], encode: Encode):
        super().__init__()
        self.stored = dict(stored)
        self.embeddings = embeddings
        self._encode = encode
        for name, weight in self.stored.items():
            weight.requires_grad_()
            self.register_parameter(name.replace(".", "/"), weight)

    def forward(self, inputs: Inputs | None) -> Tensor:
        """Returns the features of a pass, like `encode`. For a pass without images (None), this is an empty
        tensor, which must still be added to the pass. Returns a single tensor, because DeepSpeed would gather
        again for each tensor."""
        if torch.is_grad_enabled():
            found: Tensor = _Encoded.apply(self._encode, inputs, *self.parameters())
            return found
        return next(self.parameters()).new_zeros(0) if inputs is None else self._encode(inputs)


def trained_encoder_of(module: nn.Module) -> TrainedEncoder | None:
    """Returns the weights of an image encoder that are trained with a `Policy` or `Scorer`; None if there are
    none."""
    encoder = getattr(module, "image_encoder", None)
    assert encoder is None or isinstance(encoder, TrainedEncoder)
    return encoder


class _Encoded(torch.autograd.Function):
    """Computes the features of a pass, and one gradient for each weight."""

    @staticmethod
    def forward(ctx: Any, encode: Encode, inputs: Inputs | None, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        ctx.features = None
        if inputs is None:
            return weights[0].new_zeros(0)
        with torch.enable_grad():
            ctx.features = encode(inputs)
        features: Tensor = ctx.features.detach()
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features = ctx.features
        ctx.features = None  # frees the activations with the last reference
        found: tuple[Tensor | None, ...] = (None,) * len(ctx.weights)
        if features is not None:
            found = torch.autograd.grad(features, ctx.weights, gradient, allow_unused=True)
        whole = [
            torch.zeros_like(weight) if own is None else own
            for weight, own in zip(ctx.weights, found, strict=True)
        ]
        return None, None, *whole
