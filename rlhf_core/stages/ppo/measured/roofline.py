"""Computes the minimum time of an iteration: its floating-point operations and bytes divided by the limits of
the GPUs.

A forward pass of N parameters takes 2N operations per token, and training takes 6N (Kaplan et al. 2020,
section 2.1). Attention's own products and recomputation are left out. The limits are measured at the start,
on the actor's GPU, with a large matrix product and a large copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from rlhf_core.forecast.seconds import busiest
from rlhf_core.hub.model_config import num_experts
from rlhf_core.models.weights.whole_weights import whole_size
from rlhf_core.stages.ppo.rollout_records import Rollout

MATMUL = 8192
COPY = 1 << 30  # on a GPU: MATMUL is the number of rows of a square matrix, COPY is in bytes
CPU_MATMUL = 512
CPU_COPY = 1 << 24


class Ceilings(NamedTuple):
    """Holds a GPU's limits: FLOP/s of matrix products in the training dtype, and memory bandwidth in bytes/s
    (reads and writes both counted)."""

    flops: float
    bandwidth: float


class ModelShape(NamedTuple):
    """Holds the sizes of one model: parameters used per token, bytes of all weights, and bytes of keys and
    values per token. Only the experts to which a token is sent count as used. Also holds whether the model
    has experts."""

    parameters: int
    weight_bytes: int
    kv_bytes: int
    experts: bool = False


class RooflineInputs(NamedTuple):
    """Holds each role's model and GPUs, and the limits of a GPU."""

    shapes: Mapping[str, ModelShape]
    gpus: Mapping[str, Sequence[str]]
    engine_span: int
    ceilings: Ceilings


def shape_of(model: PreTrainedModel) -> ModelShape:
    config = model.config
    experts = num_experts(config)
    parameters = [(name, whole_size(p), p.element_size()) for name, p in model.named_parameters()]
    # fraction of the experts that a token is sent to
    met = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    idle = (1 - met) * sum(n for name, n, _ in parameters if ".experts." in name)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = sum(n for _, n, _ in parameters)
    weight_bytes = sum(n * width for _, n, width in parameters)
    return ModelShape(
        count - int(idle),
        weight_bytes,
        2 * config.num_hidden_layers * heads * size * parameters[0][2],
        bool(experts),
    )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures the limits of a GPU or of the CPU; each is the best of a few runs."""
    on_gpu = device.type == "cuda"
    rows, size = (MATMUL, COPY) if on_gpu else (CPU_MATMUL, CPU_COPY)
    matrix = torch.randn(rows, rows, device=device, dtype=dtype)
    source = torch.randint(0, 255, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return Ceilings(
        2 * rows**3 / best(lambda: matrix @ matrix), 2 * size / best(lambda: target.copy_(source))
    )


def floors(
    rollouts: Sequence[Rollout],
    passes: Mapping[str, float],
    machine: RooflineInputs,
    scorings: Mapping[str, float],
) -> dict[str, float]:
    """Returns the minimum seconds of each phase, as `floor/<phase>`. `passes` is the number of times that
    each role trains on each rollout; `scorings` is the number of times that it scores each rollout.

    The tokens of a prompt with several answers count once.
    """
    tokens = _prompt_tokens(rollouts) + sum(
        len(rollout.document) - rollout.document.answer_start for rollout in rollouts
    )
    scoring = {role: 2 * machine.shapes[role].parameters * tokens * times for role, times in scorings.items()}
    training = {role: 6 * machine.shapes[role].parameters * tokens * times for role, times in passes.items()}
    return {
        "floor/generate": _generate(rollouts, machine),
        "floor/score": busiest(scoring, machine.gpus) / machine.ceilings.flops,
        "floor/train": busiest(training, machine.gpus) / machine.ceilings.flops,
    }


def _generate(rollouts: Sequence[Rollout], machine: RooflineInputs) -> float:
    """Returns the minimum seconds of generation: the products of the prompts, then decoding. Decoding is
    limited either by its products or by memory reads. The reads are all keys and values, and the weights once
    per token of the longest answer."""
    shape, gpus, (flops, bandwidth) = (
        machine.shapes["sampler"],
        len(machine.gpus["sampler"]),
        machine.ceilings,
    )
    said = [np.count_nonzero(rollout.document.mask) for rollout in rollouts]
    prompts = [len(rollout.document.mask) - length for rollout, length in zip(rollouts, said, strict=True)]
    read = (
        sum(length * (prompt + length / 2) for prompt, length in zip(prompts, said, strict=True))
        * shape.kv_bytes
        / gpus
    )
    steps = max(said, default=0) * shape.weight_bytes / machine.engine_span
    decode = max((steps + read) / bandwidth, 2 * shape.parameters * sum(said) / gpus / flops)
    return 2 * shape.parameters * _prompt_tokens(rollouts) / gpus / flops + decode


def _prompt_tokens(rollouts: Sequence[Rollout]) -> int:
    """Counts the tokens of the prompts; each prompt counts once."""
    return sum(
        len(prompt)
        for prompt in {
            tuple(rollout.document.tokens[: rollout.document.answer_start]) for rollout in rollouts
        }
    )
