"""Estimates the memory of the fullest GPU and of a node's host in each phase of PPO or of a training stage.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import KINDS, PPO, Trainable
from rlhf_core.config.ppo.model_placement import gives_logprobs
from rlhf_core.config.training.sharding import Training
from rlhf_core.forecast.hardware import GIB, Gpu
from rlhf_core.forecast.memory import (
    CONTEXT,
    gpu_phases,
    group_bytes,
    image_bytes,
    largest_layer,
    roles,
    sharing,
    training_of,
    training_of_role,
    training_phases,
)
from rlhf_core.forecast.trained_weights import MOMENT, trained_weights
from rlhf_core.hub.model_config import Size
from rlhf_core.runs.resume_state import AVERAGE_BYTES, STATE_BYTES
from rlhf_core.system.gpu_allocator import ROUNDED

PROCESS = 2 * GIB  # host memory of a process with its libraries (assumed)
DIRECT = 1 / 3  # of a GPU: smaller models are loaded there without a host copy (models/load_model.py)


class PhaseBytes(NamedTuple):
    """Bytes on the fullest GPU, and on the host of a node whose GPUs all need as much host memory as the most
    demanding one."""

    gpu: float
    host: float


class _Host(NamedTuple):
    """Bytes of host memory of one process.

    `still`: at all times. `loading`, `saving`: in addition while it loads or saves. `scoring`: in addition
    while it loads a reference that scores once. `adam`: for its optimiser, which is created once the model is
    loaded. `resetting`: in addition while a reference takes over the actor's weights.
    """

    still: float
    loading: float = 0.0
    saving: float = 0.0
    scoring: float = 0.0
    adam: float = 0.0
    resetting: float = 0.0


def by_phase(config: PPO, layout: Layout, sizes: Mapping[str, Size], gpu: Gpu) -> dict[str, PhaseBytes]:
    """Returns the peaks of each phase of PPO: start-up (libraries and CUDA contexts), load, generate, score,
    train (including the optimiser's step), gather, sync, export and save.

    With `reset_reference_every`, export includes loading the exported weights into the reference. Phases that
    do not release memory (without `engine.sleep`) keep the memory taken by earlier phases, as in
    `memory.peak`.
    """
    held = roles(config, sizes, gpu.memory)
    on = sharing(layout)
    hosts = _hosts(config, sizes, gpu)
    found = []
    for names in on.values():
        on_gpu = gpu_phases([held[name] for name in names], config.engine.sleep, config.colocate_all)
        found.append(_phases(on_gpu, [hosts[name] for name in names]))
    per_node = min(gpu.per_node, len(on))
    phases = {
        phase: PhaseBytes(
            max(each[phase].gpu for each in found), per_node * max(each[phase].host for each in found)
        )
        for phase in found[0]
    }
    return _exported(phases, sizes["actor"])


def training_by_phase(config: Trainable, size: Size, zero_stage: int, gpu: Gpu) -> dict[str, PhaseBytes]:
    """Returns the peaks of a training stage: start-up, load, the reference's scores if there is one, step,
    gather, export and save. The host memory is for a node with the recipe's number of ranks per node."""
    how = training_of(config, zero_stage, gpu.memory)
    ranks = config.ranks.num_ranks_per_node
    host = _trained_on_host(size, how, KINDS[config.stage].has_vocabulary, gpu)
    if getattr(config, "reference", None) is not None:
        over = how.ranks if how.sharding.weights else 1
        host = host._replace(scoring=_loaded(size, size.parameters, over, gpu))
    found = _phases(training_phases(config, size, zero_stage, gpu.memory), [host])
    return _exported({phase: each._replace(host=ranks * each.host) for phase, each in found.items()}, size)


def training_host_doubt(phases: Mapping[str, PhaseBytes], free: float) -> str:
    """Returns a line for the log if a node of a training stage has less free host memory than estimated;
    otherwise ''. The memory of its processes does not count, because they have already started. Saving a
    state does not count either, because the state is written without a copy if memory is short."""
    return _host_doubt(
        max(each.host for phase, each in phases.items() if phase != "save") - phases["start-up"].host, free
    )


def host_doubts(
    config: PPO,
    sizes: Mapping[str, Size],
    gpu: Gpu,
    nodes: Mapping[str, Sequence[str]],
    free: Mapping[str, float],
) -> str:
    """Works like `training_host_doubt`, but returns one line for each node of PPO whose `free` bytes are
    known. `nodes`: the node of each rank of a role."""
    hosts = _hosts(config, sizes, gpu)
    needed = dict.fromkeys(free, 0.0)
    for name, places in nodes.items():
        for node in places:
            if node in needed:
                needed[node] += _beyond_start(hosts[name])
    return "".join(_host_doubt(needed[node], free[node]) for node in free)


def _beyond_start(host: _Host) -> float:
    """Returns the most host bytes that a working process needs in addition to the bytes that it has at its
    start, not counting a save."""
    return host.still - PROCESS + max(host.loading, host.adam + host.resetting)


def _host_doubt(needed: float, free: float) -> str:
    if needed <= free:
        return ""
    wanted = f"an estimated {needed / GIB:.1f} GiB on a node with {free / GIB:.1f} free"
    return f"it may run out of host memory: {wanted}; use more nodes, or offload less to the host\n"


def _phases(on_gpu: Mapping[str, float], processes: list[_Host]) -> dict[str, PhaseBytes]:
    """Returns the phases of a GPU that runs these processes."""
    count = len(processes)
    still = sum(each.still + each.adam for each in processes)
    besides = {
        "load": sum(max(0.0, each.loading - each.adam) for each in processes),
        "score": sum(each.scoring for each in processes),
        "export": sum(each.resetting for each in processes),
        "save": sum(each.saving for each in processes),
    }
    started = {"start-up": PhaseBytes(CONTEXT * count, PROCESS * count)}
    return started | {
        phase: PhaseBytes(held, still + besides.get(phase, 0.0)) for phase, held in on_gpu.items()
    }


def _exported(phases: dict[str, PhaseBytes], size: Size) -> dict[str, PhaseBytes]:
    """Returns the phases, adding the weights that only rank 0 holds in host memory while it writes the
    model."""
    export = phases["export"]
    return phases | {"export": export._replace(host=export.host + group_bytes(size))}


def _hosts(config: PPO, sizes: Mapping[str, Size], gpu: Gpu) -> dict[str, _Host]:
    actor = sizes["actor"]
    # whether a sleeping engine keeps its weights: those that are never synced again, and all beside an
    # encoder (`VllmEngine.sleep`)
    keeps = config.engine.sleep and (config.engine.adapters == "alone" or actor.encoder is not None)
    asleep = (2 * actor.parameters + image_bytes(actor, 0).weights) / config.engine.processes
    engine = _Host(PROCESS + (asleep if keeps else 0.0))
    hosts = {name: _host(config, name, sizes, gpu) for name in config.groups} | {"sampler": engine}
    for judge in config.own_judges:
        weights = 0.0
        if judge.model.engine.sleep and judge.group in sizes:
            weights = 2 * sizes[judge.group].parameters / judge.model.engine.processes
        hosts[judge.group] = _Host(PROCESS + weights)
    return hosts


def _host(config: PPO, name: str, sizes: Mapping[str, Size], gpu: Gpu) -> _Host:
    size = sizes[name]
    ranks = config.groups[name].world_size
    head = gives_logprobs(name)
    if name in ("actor", "critic"):
        return _trained_on_host(size, training_of_role(config, name, gpu.memory), head, gpu)
    count = size.parameters - (0 if head else size.head)
    over = ranks if config.ref_reward_shard else 1
    # each rank reads the exported weights into a second model on the host
    resetting = 2 * count if name == "reference" and config.reset_reference_every is not None else 0.0
    if config.ref_reward_offload:
        return _Host(PROCESS + 2 * count, encoder_on_host(size), resetting=resetting)
    loading = max(_loaded(size, count, over, gpu), encoder_on_host(size))
    return _Host(PROCESS, loading, resetting=resetting)


def _trained_on_host(size: Size, how: Training, head: bool, gpu: Gpu) -> _Host:
    count = size.parameters - (0 if head else size.head)
    loading = max(_loaded(size, count, how.ranks if how.cut else 1, gpu), encoder_on_host(size))
    still = PROCESS + (ROUNDED * how.weight * count / how.ranks if how.on_host else 0.0)
    if how.adapters:
        return _Host(still, loading)
    learnt = trained_weights(size, how, head)
    share = learnt.number / how.ranks
    adam = how.sharding.on_host(how, share, size.vocabulary * size.hidden) if how.offload else 0.0
    averages = AVERAGE_BYTES * share if how.averages else 0.0
    on_host = averages if how.offload else 0.0
    saved = STATE_BYTES * share - MOMENT * learnt.by_muon / how.ranks
    return _Host(still, loading, saved + averages, adam=adam + on_host)


def encoder_on_host(size: Size) -> float:
    """Returns the bytes that an image encoder takes in host memory while it is loaded. The encoder is loaded
    after the language model, together with the language model's embeddings and one of its layers."""
    if size.encoder is None:
        return 0.0
    layer = (size.parameters - size.vocabulary * size.hidden - size.head) / size.layers
    return 2 * (size.encoder.parameters + size.vocabulary * size.hidden + size.head + layer)


def _loaded(size: Size, count: float, shares: int, gpu: Gpu) -> float:
    """Returns the bytes of a model that pass through host memory while it is loaded."""
    if 2 * count < DIRECT * gpu.memory:
        return 0.0
    return 2 * (count if shares == 1 else min(count, count / shares + 2 * largest_layer(size)))
