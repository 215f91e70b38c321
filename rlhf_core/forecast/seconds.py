"""Seconds of the phases of a PPO iteration, before anything starts: floors over the efficiency seen in tests/benchmarks/README.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import PPO
from rlhf_core.forecast.memory import GIB, engine_needs
from rlhf_core.forecast.passes import Pass, as_laid
from rlhf_core.hub.model_config import Size

# Seen on H200s with 1.5B and 7.6B models: share of the matrix ceiling that executed operations reach.
SCORING = {True: 0.62, False: 0.75}  # with and without a vocabulary head
TRAINING = {0: 0.65, 1: 0.65, 2: 0.65, 3: 0.58}  # by ZeRO stage
LAUNCH = {0: 0.0034, 1: 0.0068, 2: 0.0068, 3: 0.0092}  # seconds a layer in which the host launches a pass, forward and backward
DECODE_STEP = 0.0032  # seconds a step of vLLM takes besides reading weights, keys and values
HOST_ADAM = 1.5e9  # parameters a second of an optimiser step on the host
SYNC = 40e9  # bytes a second into the engines
SEQUENCES = 1024.0  # answers that an engine of vLLM works on at once, where their keys and values fit
SPARE = 2 * GIB  # of an engine beside models, so that it starts also where its largest batch takes more than `engine_needs` knows
SLEEP = 20e9  # bytes a second of weights that an engine drops and takes again, to sleep and to wake


class Gpu(NamedTuple):
    """Memory in bytes, FLOP/s of bf16 matrix products and bytes/s of memory, as measured rather than as sold."""

    memory: float = 139.8 * GIB
    flops: float = 770e12
    bandwidth: float = 4.3e12

    def __str__(self) -> str:
        return f"{self.memory / GIB:.0f} GiB, {self.flops / 1e12:.0f} TFLOP/s and {self.bandwidth / 1e12:.1f} TB/s a GPU"


GPUS = {"h200": Gpu(), "h100": Gpu(memory=79.2 * GIB, bandwidth=3.0e12)}  # those that runs were measured on


def phases(config: PPO, layout: Layout, sizes: Mapping[str, Size], gpu: Gpu) -> dict[str, float]:
    """Seconds by phase for full-length answers: an upper bound where answers end early. Of generation that runs beside scoring and
    training, what those do not cover."""
    answers = config.rollout_batch_size * config.n_samples_per_prompt
    tokens = answers * config.longest
    assert config.zero_stage != "auto", "decided before (zero_stage.py)"
    scoring, training, host = {}, {}, [0.0]
    for name in config.groups:
        head = name in ("actor", "reference")
        count, stored = (size - (0 if head else sizes[name].head) for size in (sizes[name].active, sizes[name].parameters))
        if name != "actor" or not config.one_update:
            scoring[name] = 2 * count * tokens / SCORING[head] / gpu.flops
        if name in ("actor", "critic"):
            ranks = config.groups[name].world_size
            steps = answers * config.max_epochs / config.train_batch_size
            a_pass, passes = as_laid(config, ranks)
            training[name] = steps * ranks * passes * seconds_of_pass(sizes[name], a_pass, config.zero_stage, head, gpu)
            host.append(steps * stored / ranks / HOST_ADAM if name in config.adam_offload else 0.0)
    engine, gpus = sizes["actor"], layout.gpus()
    found = {
        "generate": _generate(config, engine, len(layout.slots["sampler"]), gpu),
        "score": busiest(scoring, gpus),
        "train": busiest(training, gpus) + (sum if config.colocate_all else max)(host),
        "sync": 0.1 + 2 * engine.parameters / SYNC / 2,
    }
    if config.max_staleness:
        found["generate"] = max(0.0, found["generate"] - found["score"] - found["train"])
    return found | ({"sleep and wake": 0.05 + 2 * engine.parameters / SLEEP} if config.vllm.sleep else {})


def seconds_of_pass(size: Size, what: Pass, zero_stage: int, head: bool, gpu: Gpu) -> float:
    """Its operations, or what the host takes to launch them where that is longer. `head`: as in `memory.trained`."""
    again = 1 + what.recomputed / 3  # of 3 parts, forward and twice as much backward, the first is done again
    count = size.active - (0 if head else size.head)
    return again * max(6 * count * what.tokens / TRAINING[zero_stage] / gpu.flops, size.layers * LAUNCH[zero_stage])


def shares_of_engine(config: PPO, size: Size, gpu: Gpu) -> list[float]:
    """Shares of a GPU for an engine beside models: its weights, and keys and values of all its answers, or of a half, or of fewer at a
    time, the largest first."""
    over = config.vllm.tensor_parallel_size
    answers = min(SEQUENCES, math.ceil(config.rollout_batch_size * config.n_samples_per_prompt / config.vllm.num_engines))
    wanted = [engine_needs(size, over) + SPARE + answers / part * config.longest * size.kv / over for part in (1, 2, 4, 8)]
    return list(dict.fromkeys(min(0.9, math.ceil(20 * 1.1 * each / gpu.memory) / 20) for each in wanted))


def busiest(work: Mapping[str, float], gpus: Mapping[str, Sequence[str]]) -> float:
    """The largest sum of work on one GPU: each role spreads its work evenly over its `gpus`, and GPUs work side by side."""
    load: dict[str, float] = {}
    for role, total in work.items():
        for gpu in gpus[role]:
            load[gpu] = load.get(gpu, 0.0) + total / len(gpus[role])
    return max(load.values(), default=0.0)


def _generate(config: PPO, size: Size, processes: int, gpu: Gpu) -> float:
    answers, over = config.rollout_batch_size * config.n_samples_per_prompt, config.vllm.tensor_parallel_size
    prompt, said = config.prompt_max_len, config.generate_max_len
    space = over * (config.vllm.gpu_memory_utilization * gpu.memory - engine_needs(size, over))
    at_once = min(SEQUENCES, max(1.0, space // (size.kv * config.longest))) if space > 0 else SEQUENCES  # answers in an engine
    steps = said * math.ceil(answers * over / processes / at_once)
    weights = steps * 2 * size.parameters / over
    keys = answers * said * (prompt + said / 2) * size.kv / processes
    prefill = 2 * size.active * answers * prompt / processes / gpu.flops
    decode = max((weights + keys) / gpu.bandwidth, 2 * size.active * answers * said / processes / gpu.flops)
    return prefill + decode + steps * DECODE_STEP
