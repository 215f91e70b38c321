"""Measures how much rounding may change a model's log-probs. Compares passes with and without noise of the
size of rounding errors.

Two programs that compute the same model in different orders or formats round different sums. A rounding error
is relative: its root mean square is about 0.4 of the format's unit roundoff (2^-8 for bf16, which has 8 bits
of precision). Noise is added where each decoder layer rounds: in its branches, and in the sums of the
residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.models.weights.frozen_weights import layers_of

# Unit roundoffs; fp8 is e4m3.
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "fp8": 2.0**-4}
MEAN = 6**-0.5  # root mean square of an error relative to the unit roundoff, over all mantissas
BRANCH = 10
# Roundings in a layer. BRANCH counts norms, projections, rotations, attention and activations; SUMS counts
# the additions of its two branches.
SUMS = 2
FP8_WEIGHTS = 8
FP8_CACHE = 2  # roundings that FP8 adds: weights and inputs of four projections; keys and values


class Noise(NamedTuple):
    """Holds the relative sizes of a layer's rounding errors: in its contribution to the residual stream, and
    in the stream itself."""

    branch: float
    stream: float


def noise_of(dtype: str, engine: Mapping[str, Any], float8: bool = False) -> Noise:
    """Returns the noise between a trainer and an engine of the same `dtype`, which round independently.
    `engine` holds vLLM's options; its `quantization` and `kv_cache_dtype` may name FP8. `float8` means that
    the trainer multiplies in FP8."""
    unit = MEAN * UNIT[dtype]
    fp8 = MEAN * UNIT["fp8"]
    branch = 2 * BRANCH * unit**2
    branch += FP8_WEIGHTS * fp8**2 * (float8 + ("fp8" in str(engine.get("quantization", ""))))
    branch += FP8_CACHE * fp8**2 if "fp8" in str(engine.get("kv_cache_dtype", "")) else 0.0
    return Noise(branch**0.5, (2 * SUMS) ** 0.5 * unit)


@contextmanager
def noisy(model: nn.Module, noise: Noise) -> Iterator[None]:
    """Adds noise to the output of each decoder layer while the context is open. The noise is the same each
    time."""
    generators: dict[torch.device, torch.Generator] = {}

    def add(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        before: Tensor = given[0] if given else named["hidden_states"]
        after: Tensor = output[0] if isinstance(output, tuple) else output
        if after.device not in generators:
            generators[after.device] = torch.Generator(after.device).manual_seed(0)
        stream = after.float()
        branch = (after - before).float()
        sizes = (
            noise.stream**2 * stream.square().mean(-1, keepdim=True)
            + noise.branch**2 * branch.square().mean(-1, keepdim=True)
        ).sqrt()
        drawn = torch.randn(stream.shape, generator=generators[after.device], device=after.device)
        moved = (stream + sizes * drawn).to(after.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    hooks = [layer.register_forward_hook(add, with_kwargs=True) for layer in layers_of(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
