"""Describes what a training backend shards over the ranks of a model, and the memory of its optimiser.
Torch-free.

There is one record for each value of the recipe's `zero_stage`. This file holds plain torch's,
`zero_sharding.py` holds ZeRO's, and `SHARDINGS` in `optimised.py` combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from rlhf_core.config.training.optimiser_fields import Freeze, ImageEncoder


class OptimiserBytes(NamedTuple):
    """Bytes on a GPU: the optimiser's permanent state, the gradients at their peak, and the optimiser's step,
    which starts after activations are freed."""

    state: float
    gradients: float
    step: float = 0.0


class Sharding(NamedTuple):
    """What a backend shards. `stage`: the value of the recipe's `zero_stage`.

    `weights`, `gradients`, `state` (the optimiser's): whether each is sharded. If none is, training uses one
    rank. `launch`: seconds per layer that the host needs to launch a forward and backward pass, observed on
    H200s with 1.5B and 7.6B models, in runs that tests/benchmarks has no record of. `on_gpu` returns the
    optimiser's bytes for a number of trained parameters (first argument) and the largest weight's number of
    parameters (second argument). `on_host` returns the bytes in host memory of an offloaded optimiser, for a
    rank's share of the parameters.
    """

    stage: Literal[0, 1, 2, 3]
    backend: Literal["torch", "zero"]
    weights: bool
    gradients: bool
    state: bool
    launch: float
    on_gpu: Callable[[Training, float, float], OptimiserBytes]
    on_host: Callable[[Training, float, float], float]


class Training(NamedTuple):
    """Settings that determine the memory of a trained model: ranks, fraction of layers recomputed, tokens per
    pass, Adam on the host, whether only adapters are trained (their few bytes are ignored), bytes of a GPU,
    and bytes per weight (QLoRA: NF4)."""

    ranks: int
    sharding: Sharding
    recomputed: float
    tokens: int
    offload: bool = False
    adapters: bool = False
    gpu_bytes: float = 0.0
    weight: float = 2.0
    on_host: bool = False  # the shards of the weights, between two fetches
    copies: int = 1  # ranks that share a second copy of the weights (hpZ); 1: no such copy
    sums_in_fp32: bool = False  # of the gradients of a step's passes
    averages: bool = False  # the weights' moving average, in fp32, in addition to the optimiser's state
    freeze: Freeze | None = None  # the weights that have no gradient and no optimiser state
    fp32_head: bool = False  # logits in fp32 are recomputed in chunks
    muon: bool = False  # the matrices of layers have one moment instead of two
    image_encoder: ImageEncoder = "frozen"  # what of the encoder is trained

    @property
    def cut(self) -> bool:
        """Whether weights are sharded over the ranks while they are loaded. hpZ builds its second copy from
        whole weights (training/ranks.py)."""
        return self.sharding.weights and self.copies == 1


def _in_torch(how: Training, count: float, largest: float) -> OptimiserBytes:
    """Returns the bytes that plain torch takes; its fp32 gradients replace the bf16 gradients after the
    pass."""
    return OptimiserBytes(12 * count, (4 if how.sums_in_fp32 else 2) * count, step=4 * count)


TORCH = Sharding(
    stage=0,
    backend="torch",
    weights=False,
    gradients=False,
    state=False,
    launch=0.0034,
    on_gpu=_in_torch,
    on_host=lambda how, share, largest: 0.0,  # plain torch never offloads its optimiser
)
