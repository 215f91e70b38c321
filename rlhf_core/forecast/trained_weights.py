"""Counts the weights of a model that are trained, and those that Muon trains. Torch-free.

Only these have gradients and an optimiser's state. Weights that `freeze.names` names are counted as trained,
since only the model knows its weights' names; activations below frozen layers are counted as kept. Both
estimates are too high then, and never too low.
"""

from __future__ import annotations

from typing import NamedTuple

from rlhf_core.config.training.sharding import Training
from rlhf_core.hub.model_config import BF16, Size

MOMENT = 4  # bytes of a moment of one weight, in fp32


class TrainedWeights(NamedTuple):
    """Numbers of weights: those trained (`number`), and of these the ones by Muon, which keeps one moment in
    place of Adam's two. `head`: whether a language model's head is trained."""

    number: float
    by_muon: float
    head: bool


def trained_weights(size: Size, how: Training, head: bool) -> TrainedWeights:
    """Returns what `freeze` and `optimizer` leave to which optimiser. `head`: as in `memory.trained`."""
    count = size.parameters - (0 if head else size.head)
    embeddings = size.vocabulary * size.hidden
    layers = size.layers
    head_trained = head
    if how.freeze is not None:
        frozen = min(how.freeze.layers, size.layers)
        layers -= frozen
        # besides embeddings, head and layers there is the last norm
        count -= frozen * (size.parameters - embeddings - size.head - size.hidden) / size.layers
    if how.freeze is not None and how.freeze.embeddings:
        count -= embeddings
        head_trained = head and size.head > 0
    return TrainedWeights(count, layers * layer_matrices(size) if how.muon else 0.0, head_trained)


def layer_matrices(size: Size) -> float:
    """Returns the number of weights in the matrices of a layer, without two norms and without experts, which
    one tensor holds and Muon does not train."""
    layer = (size.active - size.vocabulary * size.hidden - size.head - size.hidden) / size.layers
    if size.active < size.parameters:
        # the experts that a token uses, from the bytes of their activations
        layer -= 3 * size.hidden * (size.passing / BF16 - 4 * size.hidden) / 2
    return layer - 2 * size.hidden
