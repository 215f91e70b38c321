"""Estimates the memory of each GPU in each phase of PPO, and of a training stage, before anything starts.
Torch-free.

Bytes per parameter trained in bf16 (Rajbhandari et al. 2020, section 3.1): weights 2, fp32 copy and Adam's
two moments 12, gradients 2, and their fp32 form during the step 4; if a step has several passes, gradients
take 4 from the first pass on. PyTorch's allocator keeps the same amount again from step to step. This was
observed on H200s and fitted to their peaks; the cause was not investigated. The records of
config/training/sharding.py say how much of this a rank holds. Frozen weights take only the first 2, and Muon
keeps one moment (trained_weights.py).

Each model that reads images also has an unsharded image encoder in bf16. The encoder runs before the language
model, whose activations do not exist yet, on at most as many image tokens as a pass has tokens. Its trained
part has gradients and optimiser state like the language model's weights, and keeps activations meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import KINDS, PPO, REFERENCE_FREE, EngineConfig, Lora, Optimised, Ranks, Trainable
from rlhf_core.config.ppo.model_placement import gives_logprobs
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.sharding import Training
from rlhf_core.forecast.fitting_passes import Pass, fields_of, on_rank, recipe_pass, sums_in_fp32
from rlhf_core.forecast.hardware import GIB
from rlhf_core.forecast.trained_weights import MOMENT, trained_weights
from rlhf_core.hub.model_config import Size

CONTEXT = 0.6 * GIB  # CUDA's own memory in each process
FETCHED = 4e9  # bytes of whole weights, including its buckets, that ZeRO-3 holds at once while it computes
# of a GPU: smaller weights stay whole between the forward and backward passes, instead of being fetched again
KEPT = 1 / 16
USABLE = 0.95  # of a GPU; fragmentation takes the rest
GROUP = GIB / 8
# weights gathered at once (rounded to complete layers), and sent at once (checkpoint_weights.py, rollout/)
BUCKET = GIB / 2
CHUNK = 2048  # positions whose logits exist at once unless logits are kept (token_logprobs.py)


class ProcessBytes(NamedTuple):
    """Bytes of one process.

    `still`: at all times. `scoring`, `training`, `generating`: in addition while it scores or trains or, for
    engines, generates. `starting`: in addition while it starts and ZeRO-3 shards weights. `gathering`: whole
    weights on their way to the engines or to a file. `bucket`: weights that a sync sends at a time.
    """

    still: float
    scoring: float = 0.0
    training: float = 0.0
    generating: float = 0.0
    starting: float = 0.0
    gathering: float = 0.0
    bucket: float = 0.0


class ImageBytes(NamedTuple):
    """Bytes that one process needs for images: the encoder's weights, the tensors that the encoder's pass
    holds at once, and the features that the language model's pass keeps."""

    weights: float = 0.0
    passing: float = 0.0
    features: float = 0.0


def image_bytes(size: Size, tokens: int) -> ImageBytes:
    """Returns the bytes of a model's frozen image encoder for a pass whose `tokens` are all image tokens."""
    encoder = size.encoder
    if encoder is None:
        return ImageBytes()
    return ImageBytes(2 * encoder.parameters, tokens * encoder.passing, tokens * encoder.features)


class TunedEncoder(NamedTuple):
    """The trained part of an image encoder: its number of weights, and the bytes that its forward pass keeps
    for the backward pass."""

    weights: float = 0.0
    kept: float = 0.0


def tuned_encoder(size: Size, how: Training) -> TunedEncoder:
    """Returns the trained part of the image encoder for a pass whose tokens are all image tokens."""
    encoder = size.encoder
    if encoder is None or how.image_encoder == "frozen":
        return TunedEncoder()
    if how.image_encoder == "projector":
        return TunedEncoder(encoder.projector, how.tokens * encoder.features)
    kept = how.recomputed * (encoder.inputs + encoder.passing) + (1 - how.recomputed) * encoder.kept
    return TunedEncoder(encoder.parameters, how.tokens * kept)


def trained(size: Size, how: Training, head: bool, scoring_tokens: int) -> ProcessBytes:
    """Returns the bytes of a model with its optimiser. `head`: whether its output is the vocabulary (a
    policy) rather than one number (a critic)."""
    count = size.parameters - (0 if head else size.head)
    per_rank = count / how.ranks
    sharded = how.sharding.weights
    weights = how.weight * (per_rank if sharded else count)
    fetched = 0.0
    if sharded and how.copies > 1:
        weights += how.weight * count / how.copies
    if sharded and how.on_host:
        weights = 0.0
    if sharded:
        fetched = FETCHED + (
            2 * count if 2 * count <= KEPT * how.gpu_bytes and not how.adapters and not how.on_host else 0
        )
    learnt = trained_weights(size, how, head)
    tuned = tuned_encoder(size, how)
    state = gradients = step = 0.0
    if not how.adapters:
        state, gradients, step = how.sharding.on_gpu(
            how, learnt.number + tuned.weights, size.vocabulary * size.hidden
        )
        state -= MOMENT * learnt.by_muon
    if how.averages and not (how.adapters or how.offload):
        state += 4 * (learnt.number + tuned.weights) / how.ranks
    kept = size.layers * (how.recomputed * 2 * size.hidden + (1 - how.recomputed) * size.kept) + size.kept
    chunked = how.recomputed or how.fp32_head  # otherwise logits are kept
    positions = CHUNK if chunked else how.tokens
    logits = max(CHUNK * 10, positions * 2) * size.vocabulary if head else 0
    # the head's gradient: in fp32, summed over chunks, and in bf16
    if learnt.head and chunked and how.sums_in_fp32 and not how.adapters:
        logits += (4 + 2) * size.vocabulary * size.hidden
    if sharded and not how.adapters:
        # gradients of a layer wait for its last one
        gradients += 2 * (count - (size.head if head else 0)) / size.layers
    scoring = read(size, scoring_tokens, head).scoring
    images = image_bytes(size, how.tokens)
    language = how.tokens * kept + logits + images.features
    training = max(gradients + tuned.kept + max(language, images.passing), step)
    whole = how.weight * count
    # Adam's state is created after sharding
    starting = min(FETCHED, whole) if how.cut else max(0.0, whole - weights - state)
    gathering = group_bytes(size) if sharded else 0.0
    return ProcessBytes(
        CONTEXT + weights + images.weights + state,
        fetched + scoring,
        fetched + training,
        starting=starting,
        gathering=gathering,
    )


def loaded(size: Size, head: bool, weight: float, ranks: int = 1, on_host: bool = False) -> float:
    """Returns the bytes that a process needs on its GPU while it loads a model: the whole model or, under
    ZeRO-3, its share over `ranks` (in host memory with `on_host`), plus weights that are still whole."""
    count = weight * (size.parameters - (0 if head else size.head))
    return (
        CONTEXT + (0.0 if on_host else count / ranks) + (min(FETCHED, count) if ranks > 1 or on_host else 0.0)
    )


def largest_layer(size: Size) -> float:
    """Returns the number of parameters of a layer, or of the embeddings if they have more."""
    embeddings = size.vocabulary * size.hidden
    return max(embeddings, (size.parameters - embeddings - size.head) / size.layers)


def group_bytes(size: Size) -> float:
    """Returns the bytes of bf16 checkpoint weights that are gathered at the same time while they are sent to
    engines or written to a file."""
    return min(2 * size.parameters, GROUP + 2 * largest_layer(size))


def read(size: Size, tokens: int, head: bool, offload: bool = False, ranks: int = 1) -> ProcessBytes:
    """Returns the bytes of a model that is only read. With `offload`, its weights are on the GPU only while
    it scores. `ranks`: number of ranks over which it is sharded."""
    whole = 2 * (size.parameters - (0 if head else size.head))
    weights = whole / ranks
    fetched = min(FETCHED, whole) if ranks > 1 else 0.0
    images = image_bytes(size, tokens)
    passing = tokens * size.passing + (CHUNK * size.vocabulary * 6 if head else 0) + images.features
    passing = max(passing, images.passing) + fetched
    # with `offload` the encoder stays on the GPU
    still = CONTEXT + images.weights + (0 if offload else weights)
    return ProcessBytes(still, passing + (weights if offload else 0))


def bytes_of_weights(lora: Lora | None) -> float:
    """Returns the bytes per weight of a model that is trained directly (bf16) or is the base of adapters
    (bf16, or 4 bits plus the constants of their blocks; Dettmers et al. 2023)."""
    return 2.0 if lora is None or lora.quantize == "none" else 0.52


def engine_needs(size: Size, over: int) -> float:
    """Returns the bytes that an engine needs on each of `over` GPUs to start: its weights, including an image
    encoder, and the memory that `rollout/vllm/patches/gpu_worker.py` sets aside for its largest batch."""
    return (2 * size.parameters + image_bytes(size, 0).weights) / over + 3 * GIB


def roles(config: PPO, sizes: Mapping[str, Size], gpu_bytes: float) -> dict[str, ProcessBytes]:
    """Returns the bytes that each process of each group holds.

    `sizes` has the model of each group of models. A judge's engine takes its share of the GPU; if it sleeps,
    it takes the share only while it judges. Judges that sleep load before the other models.
    """
    a_pass = config.scoring_pass.most_tokens(config.longest)
    held: dict[str, ProcessBytes] = {}
    for name, ranks in config.groups.items():
        head = gives_logprobs(name)
        scoring = on_rank(a_pass, config.sharing_of(name))
        if name in ("actor", "critic"):
            found = trained(sizes[name], training_of_role(config, name, gpu_bytes), head, scoring)
            held[name] = found._replace(bucket=BUCKET) if name == "actor" else found._replace(gathering=0.0)
        else:
            over = ranks.world_size if config.ref_reward_shard else 1
            held[name] = read(sizes[name], scoring, head, config.ref_reward_offload, over)
    awake = config.engine.gpu_memory_utilization * gpu_bytes
    # a larger weight gets its own bucket
    bucket = max(BUCKET, 2 * sizes["actor"].vocabulary * sizes["actor"].hidden)
    engine = (
        ProcessBytes(1.0 * GIB, generating=awake) if config.engine.sleep else ProcessBytes(CONTEXT + awake)
    )
    return held | {"sampler": engine._replace(bucket=bucket)} | _judges(config, gpu_bytes)


def _judges(config: PPO, gpu_bytes: float) -> dict[str, ProcessBytes]:
    """Returns the bytes that each process of a judge's engines holds."""
    found = {}
    for judge in config.own_judges:
        share = judge.model.engine.gpu_memory_utilization * gpu_bytes
        sleeps = judge.model.engine.sleep
        found[judge.group] = ProcessBytes(1.0 * GIB, share) if sleeps else ProcessBytes(CONTEXT + share)
    return found


def engine_sizes(config: PPO, sizes: Mapping[str, Size]) -> dict[str, tuple[EngineConfig, Size]]:
    """Returns the engines of each group that has engines, and the size of their model if known."""
    engines = {"sampler": (config.engine, sizes.get("actor"))}
    engines |= {judge.group: (judge.model.engine, sizes.get(judge.group)) for judge in config.own_judges}
    return {name: (engine, size) for name, (engine, size) in engines.items() if size is not None}


def lacking_for_engines(config: PPO, sizes: Mapping[str, Size], gpu_bytes: float) -> float:
    """Returns the bytes that an engine lacks for its weights in its share of a GPU; 0 or less if the share of
    every engine suffices."""
    return max(
        engine_needs(size, engine.processes) - engine.gpu_memory_utilization * gpu_bytes
        for engine, size in engine_sizes(config, sizes).values()
    )


def copies(config: Optimised, ranks: Ranks) -> int:
    """Returns the number of ranks that share a second copy of the weights (`zero_hpz`); 1 means that there is
    no second copy."""
    return ranks.num_ranks_per_node if config.zero_hpz and ranks.num_nodes > 1 else 1


def training_of_role(config: PPO, role: str, gpu_bytes: float) -> Training:
    """Returns the settings that determine the memory of PPO's actor or critic. The ZeRO stage must already be
    chosen (zero_stage.py)."""
    assert config.sharding is not None
    ranks = config.groups[role]
    tokens, recomputed = recipe_pass(config, ranks.world_size)
    found = _training(config, role, ranks, config.sharding.stage, gpu_bytes, Pass(tokens, recomputed))
    return found._replace(sums_in_fp32=sums_in_fp32(config, ranks.world_size))


def training_of(config: Trainable, zero_stage: int, gpu_bytes: float, what: Pass | None = None) -> Training:
    """Returns the settings that determine the memory of a training stage, with the passes of the recipe or of
    `what`."""
    passes = what or recipe_pass(config, config.ranks.world_size)
    as_recipe = config if what is None else config.model_copy(update=fields_of(what, config))
    found = _training(config, "model", config.ranks, zero_stage, gpu_bytes, passes)
    return found._replace(sums_in_fp32=sums_in_fp32(as_recipe, config.ranks.world_size))


def _training(
    config: Optimised, role: str, ranks: Ranks, zero_stage: int, gpu_bytes: float, what: Pass
) -> Training:
    return Training(
        ranks=ranks.world_size,
        sharding=SHARDINGS[zero_stage],
        recomputed=what.recomputed,
        tokens=on_rank(what.tokens, config.sequence_parallel_size),
        offload=role in config.offloaded("adam"),
        adapters=config.lora is not None,
        gpu_bytes=gpu_bytes,
        weight=bytes_of_weights(config.lora),
        on_host=role in config.offloaded("param"),
        copies=copies(config, ranks),
        averages=config.ema is not None and role != "critic",
        freeze=config.freeze,
        muon=config.optimizer == "muon",
        image_encoder=config.image_encoder if role in ("actor", "model") else "frozen",
        fp32_head=role != "critic" and getattr(config, "fp32_head", False),
    )


def sharing(layout: Layout) -> dict[str, list[str]]:
    """Returns the groups on each GPU. Groups that need less than a whole GPU share GPUs."""
    on: dict[str, list[str]] = {}
    for name, places in layout.gpus().items():
        for place in places:
            on.setdefault(place, []).append(name)
    return dict(sorted(on.items()))


def gpu_peaks(
    config: PPO, layout: Layout, held: Mapping[str, ProcessBytes]
) -> dict[str, tuple[list[str], float]]:
    """Returns, for each kind of GPU, such as `GPU 0`, the groups on it and its peak bytes."""
    return {
        place: (names, peak([held[name] for name in names], config.engine.sleep, config.colocate_all))
        for place, names in sharing(layout).items()
    }


def peak(processes: list[ProcessBytes], released: bool, in_turn: bool = False) -> float:
    """Returns the bytes of a GPU's fullest phase (see `gpu_phases`)."""
    return max(gpu_phases(processes, released, in_turn).values())


def gpu_phases(processes: list[ProcessBytes], released: bool, in_turn: bool = False) -> dict[str, float]:
    """Returns the bytes of a GPU with these processes, by phase.

    With `released`, each phase can use the memory of the previous one, and with `in_turn` each training
    process can use the memory of the previous one. Otherwise each process keeps as much as its largest phase
    took. All processes start at the same time, with engines awake.
    """
    still, scoring, generating, starting, gathering, bucket = (
        sum(getattr(process, name) for process in processes)
        for name in ("still", "scoring", "generating", "starting", "gathering", "bucket")
    )
    load = {"load": still + starting + generating}
    needed = {
        "generate": generating,
        "score": scoring,
        "train": (max if in_turn else sum)(process.training for process in processes),
        "gather": gathering,
        "sync": generating + gathering + bucket,
        "export": gathering,
        "save": 0.0,
    }
    if not released:
        syncing = [process.generating + process.gathering + process.bucket for process in processes]
        kept = sum(
            max(process.scoring, process.training, most)
            for process, most in zip(processes, syncing, strict=True)
        )
        needed = dict.fromkeys(needed, kept)
    return load | {phase: still + besides for phase, besides in needed.items()}


def training_phases(
    config: Trainable, size: Size, zero_stage: int, gpu_bytes: float, what: Pass | None = None
) -> dict[str, float]:
    """Returns the bytes of a training stage's GPU, by phase, with the passes of the recipe or of `what`.

    The reference of DPO and KTO scores before the first step. It is the model itself or a second one (assumed
    to have the same size), which ZeRO-3 also shards over the ranks (training/ranks.py).
    """
    head = KINDS[config.stage].has_vocabulary
    how = training_of(config, zero_stage, gpu_bytes, what)
    held = trained(size, how, head, how.tokens)
    score = {}
    if "reference" in KINDS[config.stage].names and getattr(config, "loss", "") not in REFERENCE_FREE:
        second = read(size, how.tokens, head, ranks=how.ranks if how.sharding.weights else 1)
        named = getattr(config, "reference", None) is not None
        score["score"] = held.still + (second.still - CONTEXT + second.scoring if named else held.scoring)
    return {
        "load": held.still + held.starting,
        **score,
        "step": held.still + held.training,
        "gather": held.still + held.gathering,
        "export": held.still + held.gathering,
        "save": held.still,
    }
