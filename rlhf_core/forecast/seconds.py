"""Seconds of the phases of a PPO iteration, before anything starts: floors over the efficiency seen in tests/benchmarks/README.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import PPO
from rlhf_core.forecast.memory import engine_needs
from rlhf_core.forecast.sizes import Size

# Seen on H200s with 1.5B and 7.6B models: share of the matrix ceiling that executed operations reach.
SCORING = {True: 0.62, False: 0.75}  # with and without a vocabulary head
TRAINING = {0: 0.65, 1: 0.65, 2: 0.65, 3: 0.58}  # by ZeRO stage
DECODE_STEP = 0.0032  # seconds a step of vLLM takes besides reading weights, keys and values
HOST_ADAM = 1.5e9  # parameters a second of an optimiser step on the host
SYNC = 40e9  # bytes a second into the engines
SEQUENCES = 1024.0  # answers that an engine of vLLM works on at once, where their keys and values have room
SLEEP = 20e9  # bytes a second of weights that an engine drops and takes again, to sleep and to wake


class Card(NamedTuple):
    """Memory in bytes, FLOP/s of bf16 matrix products and bytes/s of memory, as measured rather than as sold."""

    memory: float = 139.8 * 2**30
    flops: float = 770e12
    bandwidth: float = 4.3e12


def phases(config: PPO, layout: Layout, sizes: Mapping[str, Size], card: Card) -> dict[str, float]:
    """Seconds by phase for full-length answers: an upper bound where answers end early. Of generation that runs beside scoring and
    training, what those do not cover."""
    answers = config.rollout_batch_size * config.n_samples_per_prompt
    tokens = answers * (config.prompt_max_len + config.generate_max_len)
    assert config.zero_stage != "auto", "decided before (zero.py)"
    executed = 6 + 2 * config.gradient_checkpointing
    scoring, training, host = {}, {}, [0.0]
    for name in config.groups:
        head = name in ("actor", "reference")
        count, stored = (size - (0 if head else sizes[name].head) for size in (sizes[name].active, sizes[name].parameters))
        scoring[name] = 2 * count * tokens / SCORING[head]
        if name in ("actor", "critic"):
            training[name] = executed * count * tokens * config.max_epochs / TRAINING[config.zero_stage]
            steps = answers * config.max_epochs / config.train_batch_size
            host.append(steps * stored / config.groups[name].world_size / HOST_ADAM if name in config.adam_offload else 0.0)
    engine = sizes["actor"]
    found = {
        "generate": _generate(config, engine, len(layout.seats["sampler"]), card),
        "score": _busiest(scoring, layout, card),
        "train": _busiest(training, layout, card) + (sum if config.colocate_all else max)(host),
        "sync": 0.1 + 2 * engine.parameters / SYNC / 2,
    }
    if config.one_step_off_policy:
        found["generate"] = max(0.0, found["generate"] - found["score"] - found["train"])
    return found | ({"sleep and wake": 0.05 + 2 * engine.parameters / SLEEP} if config.vllm.sleep else {})


def _busiest(work: Mapping[str, float], layout: Layout, card: Card) -> float:
    """Seconds of the card with the most to do; groups in fractions share cards."""
    load: dict[str, float] = {}
    places = layout.cards()
    for name, flops in work.items():
        seats: Sequence[int] = [seat.bundle for seat in layout.seats[name]]
        for bundle in seats:
            load[places[bundle]] = load.get(places[bundle], 0.0) + flops / len(seats)
    return max(load.values(), default=0.0) / card.flops


def _generate(config: PPO, size: Size, processes: int, card: Card) -> float:
    answers, over = config.rollout_batch_size * config.n_samples_per_prompt, config.vllm.tensor_parallel_size
    prompt, said = config.prompt_max_len, config.generate_max_len
    room = over * (config.vllm.gpu_memory_utilization * card.memory - engine_needs(size, over))
    at_once = min(SEQUENCES, max(1.0, room // (size.kv * (prompt + said)))) if room > 0 else SEQUENCES  # answers in an engine
    steps = said * math.ceil(answers * over / processes / at_once)
    weights = steps * 2 * size.parameters / over
    keys = answers * said * (prompt + said / 2) * size.kv / processes
    prefill = 2 * size.active * answers * prompt / processes / card.flops
    decode = max((weights + keys) / card.bandwidth, 2 * size.active * answers * said / processes / card.flops)
    return prefill + decode + steps * DECODE_STEP
