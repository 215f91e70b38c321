"""Simulates the phases of a PPO iteration before anything starts, dividing operations and bytes by rates.
Torch-free.

Operations: 2N per token for a forward pass of N parameters without embeddings, 6N for training (Kaplan et al.
2020, section 2.1), and 2 x layers x hidden x length for the products of causal attention in a forward pass
(for a token at the mean distance). Bytes: weights, keys and values read while decoding; weights and gradients
sent by ZeRO (Rajbhandari et al. 2020, section 7). The rates are in rates.py. With an image encoder, prompts
are assumed to be images of full length. Each model's encoder runs forward once for each document, a trained
one also backward, and an engine's encoder once for each prompt. The products of the encoder's attention are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import PPO
from rlhf_core.config.ppo.model_placement import gives_logprobs
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.forecast.fitting_passes import Pass, as_laid
from rlhf_core.forecast.hardware import GIB, Gpu, gather_seconds, nodes_of
from rlhf_core.forecast.memory import KEPT, engine_needs
from rlhf_core.forecast.rates import FAST, SLOW, TYPICAL, Rates
from rlhf_core.hub.model_config import Size

HOST_ADAM = 1.5e9
# parameters per second of an optimiser step on the host: of one rank, and of all ranks of a node (assumed)
NODE_ADAM = 6e9
SYNC = 40e9  # bytes per second sent into the engines
ALL_REDUCE = 15e-6  # seconds per all-reduce between the GPUs of an engine; each layer has two (assumed)
SEQUENCES = 1024.0  # answers that a vLLM engine processes at once, if their keys and values fit
# for an engine beside models, so that it starts even if its largest batch takes more than the estimate of
# `engine_needs`
SPARE = 2 * GIB
# How much faster `float8` makes a pass without gradients, and a training pass, in which the products for the
# gradients of weights stay in bf16. The records of tests/benchmarks with 1.5 and 7.6 billion parameters show
# 1.26 to 1.40, and 1.08 to 1.13.
FP8_SCORING = 1.33
FP8_TRAINING = 1.12
BOTH_WAYS = 3  # operations of a forward and a backward pass, in those of a forward pass
SLEEP = 20e9  # bytes per second of weights that an engine drops or restores when it sleeps or wakes


class Sending(NamedTuple):
    """Seconds spent sending weights and gradients: in a pass without gradients, in a training pass, in an
    optimiser step, and in all the scoring of an iteration."""

    scoring: float = 0.0
    training: float = 0.0
    step: float = 0.0
    once: float = 0.0


class Range(NamedTuple):
    """Seconds by phase at the best, the median and the worst of the measured rates."""

    fast: dict[str, float]
    typical: dict[str, float]
    slow: dict[str, float]


def phases_as_range(config: PPO, layout: Layout, sizes: Mapping[str, Size], gpu: Gpu) -> Range:
    return Range(*(phases(config, layout, sizes, gpu, rates) for rates in (FAST, TYPICAL, SLOW)))


def phases(
    config: PPO, layout: Layout, sizes: Mapping[str, Size], gpu: Gpu, rates: Rates = TYPICAL
) -> dict[str, float]:
    """Returns the seconds by phase for full-length answers, an upper bound if answers end early. Where
    generation overlaps with scoring and training, only the remainder counts."""
    answers = config.rollout_batch_size * config.n_samples_per_prompt
    tokens = answers * config.longest
    sharding = config.sharding
    assert sharding is not None, "decided before (zero_stage.py)"
    scoring = {}
    training = {}
    host = [0.0]
    in_scoring = FP8_SCORING if config.float8 else 1.0
    in_training = FP8_TRAINING if config.float8 else 1.0
    for name, group in config.groups.items():
        size = sizes[name]
        head = gives_logprobs(name)
        ranks = group.world_size
        sent = sending(config, name, size, gpu)
        # within a node, the measured rates include sending
        spread = rates.exposed if nodes_of(ranks, gpu) > 1 else 0.0
        times = config.scorings[name]
        if times:
            passes = math.ceil(tokens / ranks / config.scoring_pass.most_tokens(config.longest))
            rate = in_scoring * rates.scoring * gpu.flops
            computed = forward_operations(size, head, config.longest) * tokens / rate
            computed += encoding(config, size, answers) / (rates.scoring * gpu.flops)
            scoring[name] = times * (
                beside(computed, ranks * passes * sent.scoring, spread) + ranks * sent.once
            )
        if name in ("actor", "critic"):
            steps = answers * config.max_epochs / config.train_batch_size
            a_pass, passes = as_laid(config, ranks)
            again = config.fp32_head and head
            of_pass = seconds_of_pass(size, a_pass, sharding.stage, head, gpu, config.longest, rates, again)
            # of the documents of a rank's share of a step
            images = encoding(config, size, config.train_batch_size / ranks) / (rates.scoring * gpu.flops)
            if name == "actor" and config.image_encoder == "trained":
                images *= BOTH_WAYS
            computed = passes * of_pass / in_training + images
            training[name] = (
                steps
                * ranks
                * (beside(computed, passes * sent.training, spread) + beside(0.0, sent.step, spread))
            )
            stored = size.parameters - (0 if head else size.head)
            on_host = seconds_of_host_adam(stored, ranks, gpu)
            host.append(steps * on_host if name in config.adam_offload else 0.0)
    engine = sizes["actor"]
    gpus = layout.gpus()
    # adapters take hardly any time in comparison
    sent_whole = 0 if config.engine.adapters == "alone" else 2 * engine.parameters
    gathered = gather_seconds(sent_whole, config.actor_ranks.world_size, gpu) if sharding.weights else 0.0
    found = {
        "generate": _generate(config, engine, len(layout.slots["sampler"]), gpu, rates),
        "score": busiest(scoring, gpus),
        "train": busiest(training, gpus) + (sum if config.colocate_all else max)(host),
        "sync": 0.1 + max(sent_whole / SYNC / 2, gathered),
    }
    if config.max_staleness:
        found["generate"] = max(0.0, found["generate"] - found["score"] - found["train"])
    moved = 2 * engine.parameters / config.engine.processes
    return found | ({"sleep and wake": 0.05 + moved / SLEEP} if config.engine.sleep else {})


def forward_operations(size: Size, head: bool, length: int) -> float:
    """Returns the operations of a forward pass for one token of a document of `length` tokens. Embeddings are
    looked up, which takes no operations. `head`: whether the output is the vocabulary."""
    embeddings = size.vocabulary * size.hidden
    layers = size.active - size.head - embeddings
    return 2 * (layers + (embeddings if head else 0)) + 2 * size.layers * size.hidden * length


def encoding(config: PPO, size: Size, documents: float) -> float:
    """Returns the operations of a model's image encoder for documents whose prompts are all images."""
    return 0.0 if size.encoder is None else documents * config.prompt_max_len * size.encoder.operations


def seconds_of_pass(
    size: Size,
    what: Pass,
    zero_stage: int,
    head: bool,
    gpu: Gpu,
    length: int = 0,
    rates: Rates = TYPICAL,
    logits_twice: bool = False,
) -> float:
    """Returns the time of the pass's operations, or the host's time to launch them if that is longer. `head`:
    as in `memory.trained`. `logits_twice`: whether the head's product is computed again in the backward half
    (`fp32_head`)."""
    again = 1 + what.recomputed / 3  # of 3 parts, one forward and two backward, the first is recomputed
    sharding = SHARDINGS[zero_stage]
    share = rates.sharded if sharding.weights else rates.training
    logits = 2 * size.vocabulary * size.hidden if logits_twice else 0
    operations = 3 * again * forward_operations(size, head, length) + logits
    return max(
        operations * what.tokens / share / gpu.flops,
        again * size.layers * sharding.launch,
    )


def seconds_of_host_adam(parameters: float, ranks: int, gpu: Gpu) -> float:
    """Returns the seconds of an optimiser step on the host for a model that is sharded over `ranks`."""
    by_rank = min(HOST_ADAM, NODE_ADAM / min(ranks, gpu.per_node))
    return parameters / ranks / by_rank


def beside(computed: float, sent: float, exposed: float) -> float:
    """Returns the seconds for computing and sending at once: the longer of the two, plus the fraction
    `exposed` of the shorter."""
    return max(computed, sent) + exposed * min(computed, sent)


def sending(config: PPO, role: str, size: Size, gpu: Gpu) -> Sending:
    """Returns the seconds spent sending a role's data, in bf16.

    ZeRO-3 gathers weights for each pass, and again for the backward half unless they are kept (with hpZ, from
    the same node), and reduces gradients. Stages 1 and 2 gather weights once a step and reduce gradients,
    stage 2 in every pass. Adapters have hardly any gradients. With weights in host memory, each fetch reads
    the rank's shard over the link to the host. Frozen models are read in full, once, with
    `ref_reward_offload`, and gathered for each pass with `ref_reward_shard`.
    """
    ranks = config.groups[role].world_size
    weights = 2 * (size.parameters - (0 if gives_logprobs(role) else size.head))
    whole = gather_seconds(weights, ranks, gpu)
    if role not in ("actor", "critic"):
        if config.ref_reward_shard:
            return Sending(scoring=whole)
        return Sending(once=weights / gpu.host if config.ref_reward_offload else 0.0)
    reduced = 0.0 if config.lora is not None else whole
    sharding = config.sharding
    assert sharding is not None, "decided before (zero_stage.py)"
    if sharding.weights:
        read = weights / ranks / gpu.host if role in config.param_offload else 0.0
        in_node = gather_seconds(weights, min(ranks, gpu.per_node), gpu)
        again = (
            0.0
            if weights <= KEPT * gpu.memory and not read
            else (in_node if config.zero_hpz else whole) + read
        )
        return Sending(whole + read, whole + read + again + reduced)
    if not sharding.state or config.lora is not None:
        return Sending()
    return Sending(0.0, reduced, whole) if sharding.gradients else Sending(0.0, 0.0, reduced + whole)


def shares_of_engine(config: PPO, size: Size, gpu: Gpu) -> list[float]:
    """Returns possible shares of a GPU for an engine that shares it with models, largest first. Each share
    has room for the engine's weights and for the keys and values of all its answers, of half of them, or of
    fewer."""
    over = config.engine.processes
    answers = min(
        SEQUENCES,
        math.ceil(config.rollout_batch_size * config.n_samples_per_prompt / config.engine.num_engines),
    )
    wanted = [
        engine_needs(size, over) + SPARE + answers / part * config.longest * size.kv / over
        for part in (1, 2, 4, 8)
    ]
    return list(dict.fromkeys(min(0.9, math.ceil(20 * 1.1 * each / gpu.memory) / 20) for each in wanted))


def busiest(work: Mapping[str, float], gpus: Mapping[str, Sequence[str]]) -> float:
    """Returns the largest total work on one GPU. Each role spreads its work evenly over its `gpus`, and GPUs
    work in parallel."""
    load: dict[str, float] = {}
    for role, total in work.items():
        for gpu in gpus[role]:
            load[gpu] = load.get(gpu, 0.0) + total / len(gpus[role])
    return max(load.values(), default=0.0)


def _generate(config: PPO, size: Size, processes: int, gpu: Gpu, rates: Rates) -> float:
    answers = config.rollout_batch_size * config.n_samples_per_prompt
    over = config.engine.processes
    prompt = config.prompt_max_len
    said = config.generate_max_len
    space = over * (config.engine.gpu_memory_utilization * gpu.memory - engine_needs(size, over))
    # answers that an engine processes at once
    at_once = min(SEQUENCES, max(1.0, space // (size.kv * config.longest))) if space > 0 else SEQUENCES
    steps = said * math.ceil(answers * over / processes / at_once)
    # this many batches are in progress, and each reads the weights of all stages
    stages = over // config.engine.tensor_parallel_size
    weights = steps * stages * 2 * size.parameters / over
    keys = answers * said * (prompt + said / 2) * size.kv / processes
    encoded = encoding(config, size, answers / config.n_samples_per_prompt)
    prefill = (2 * size.active * answers * prompt + encoded) / processes / gpu.flops
    decode = max((weights + keys) / gpu.bandwidth, 2 * size.active * answers * said / processes / gpu.flops)
    talking = 2 * size.layers * ALL_REDUCE if config.engine.tensor_parallel_size > 1 else 0.0
    return prefill + decode + steps * stages * (rates.decode_step + talking / stages)
