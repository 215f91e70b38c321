"""Counts the trained weights of a model, and how many of them Muon trains. Torch-free.

Only these have gradients and optimiser state. Weights that `freeze.names` freezes count as trained, since
only the model knows the names of its weights, and activations below frozen layers count as kept. These
estimates may therefore be too high, but never too low.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhf_core.config.training.sharding import Training
from rlhf_core.hub.model_config import BF16, Size

MOMENT = 4  # bytes of a moment of one weight, in fp32


class TrainedWeights(NamedTuple):
    """The number of trained weights (`number`), and the number trained by Muon, which keeps one moment
    instead of Adam's two. `head`: whether a language model's head is trained."""

    number: float
    by_muon: float
    head: bool


def trained_weights(size: Size, how: Training, head: bool) -> TrainedWeights:
    """Returns the weights that `freeze` does not freeze, and how many of them Muon trains according to
    `optimizer`. `head`: as in `memory.trained`."""
    count = size.parameters - (0 if head else size.head)
    embeddings = size.vocabulary * size.hidden
    layers = size.layers
    head_trained = head
    if how.freeze is not None:
        frozen = min(how.freeze.layers, size.layers)
        layers -= frozen
        # besides embeddings, head and layers, there is the final norm
        count -= frozen * (size.parameters - embeddings - size.head - size.hidden) / size.layers
    if how.freeze is not None and how.freeze.embeddings:
        count -= embeddings
        head_trained = head and size.head > 0
    return TrainedWeights(count, layers * layer_matrices(size) if how.muon else 0.0, head_trained)


def layer_matrices(size: Size) -> float:
    """Returns the number of weights in a layer's matrices. Its two norms are excluded, and so are experts,
    which are stored in one tensor that Muon does not train."""
    layer = (size.active - size.vocabulary * size.hidden - size.head - size.hidden) / size.layers
    if size.active < size.parameters:
        # the experts that a token uses, derived from the bytes of their activations
        layer -= 3 * size.hidden * (size.passing / BF16 - 4 * size.hidden) / 2
    return layer - 2 * size.hidden
