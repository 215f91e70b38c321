"""Memory of the fullest GPU, and of a node's host, in each phase of a PPO or a training stage. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlhf_core.cluster.layout import Layout
from rlhf_core.config import KINDS, PPO, Trainable
from rlhf_core.forecast.hardware import GIB, Gpu
from rlhf_core.forecast.memory import CODE, CONTEXT, Held, Sharding, Training, largest_layer, read, roles, trained, training_of
from rlhf_core.hub.model_config import Size

PROCESS = 2 * GIB  # host memory of a process with its libraries (assumed)
GROUP, BUCKET = GIB, GIB / 2  # weights that are gathered at once, and sent at once (models/weights.py, rollout/weight_transfer.py)
HELD_BY_ADAM = 16.0  # bytes a parameter of Adam on the host: fp32 weights, gradients and two moments
DIRECT = 1 / 3  # of a GPU: models below it are loaded there without a copy in host memory (models/load.py)


class Phase(NamedTuple):
    """Bytes of the fullest GPU, and of the host of a node whose GPUs are all like the one that asks most of it."""

    gpu: float
    host: float


class _Host(NamedTuple):
    """Bytes of host memory of one process: always, and besides while it loads and saves."""

    still: float
    loading: float = 0.0
    saving: float = 0.0


def by_phase(config: PPO, layout: Layout, sizes: Mapping[str, Size], gpu: Gpu, sharding: Sharding = CODE) -> dict[str, Phase]:
    """Peaks of start-up (libraries and CUDA's contexts), load, generate, score, train (the optimiser's step among it), gather, sync, export
    and save. Phases in which memory is not given back (without `vllm.sleep`) keep what an earlier one took, as in `memory.peak`."""
    held = roles(config, sizes, gpu.memory, sharding)
    hosts = {name: _host(config, name, sizes, gpu, sharding) for name in config.groups} | {"sampler": _Host(PROCESS)}
    on: dict[str, list[str]] = {}
    for name, places in layout.gpus().items():
        for place in places:
            on.setdefault(place, []).append(name)
    found = [_on_one(config, names, held, hosts, sizes["actor"], gpu) for names in on.values()]
    per_node = min(gpu.per_node, len(on))
    return {
        phase: Phase(max(each[phase].gpu for each in found), per_node * max(each[phase].host for each in found)) for phase in found[0]
    } | _at_rank_0(found, sizes["actor"], per_node, sharding)


def _on_one(config: PPO, names: list[str], held: Mapping[str, Held], hosts: Mapping[str, _Host], actor: Size, gpu: Gpu) -> dict[str, Phase]:
    """The phases on one GPU with these groups."""
    processes, of_host = [held[name] for name in names], [hosts[name] for name in names]
    still = sum(process.still for process in processes)
    host = sum(each.still for each in of_host)

    def most(*needed: str) -> float:
        """Bytes besides `still` in phases of these names, of processes that work at once."""
        values = [max(getattr(process, name) for name in needed) for process in processes]
        return max(values) if config.colocate_all and needed == ("training",) and config.vllm.sleep else sum(values)

    gathered = max(GROUP, 2 * largest_layer(actor)) if config.zero_stage == 3 and "actor" in names else 0.0
    awake = most("generating")
    cached = 0.0 if config.vllm.sleep else most("scoring", "training", "generating")
    buckets = BUCKET * len({"actor", "sampler"} & set(names))
    return {
        "start-up": Phase(CONTEXT * len(names), PROCESS * len(names)),
        "load": Phase(still + most("starting") + awake, host + sum(each.loading for each in of_host)),
        "generate": Phase(still + max(cached, awake), host),
        "score": Phase(still + max(cached, most("scoring")), host),
        "train": Phase(still + max(cached, most("training")), host),
        "gather": Phase(still + max(cached, gathered), host),
        "sync": Phase(still + max(cached, awake + gathered + buckets), host),
        "export": Phase(still + max(cached, gathered), host),
        "save": Phase(still + cached, host + sum(each.saving for each in of_host)),
    }


def _at_rank_0(found: list[dict[str, Phase]], actor: Size, per_node: int, sharding: Sharding) -> dict[str, Phase]:
    """The export, for which rank 0 alone has the model, or a group of its weights, in host memory."""
    export = max(found, key=lambda each: each["export"].gpu)["export"]
    host = per_node * max(each["export"].host for each in found)
    return {"export": Phase(export.gpu, host + (GROUP if sharding.export else 2 * actor.parameters))}


def training_by_phase(config: Trainable, size: Size, zero_stage: int, gpu: Gpu, sharding: Sharding = CODE) -> dict[str, Phase]:
    """Peaks of a training stage: start-up, load, the reference's scores where there is one, step, gather, export and save."""
    head, how = KINDS[config.stage].has_vocabulary, training_of(config, zero_stage, gpu.memory, sharding=sharding)
    held, scored = trained(size, how, head, how.tokens), read(size, how.tokens, head)
    host = _trained_on_host(size, how, head, gpu)
    ranks = min(gpu.per_node, how.ranks)
    gathered = max(GROUP, 2 * largest_layer(size)) if zero_stage == 3 else 0.0
    reference = {"score": Phase(held.still + scored.still + scored.scoring, ranks * host.still)}
    return {
        "start-up": Phase(CONTEXT, ranks * PROCESS),
        "load": Phase(held.still + held.starting, ranks * (host.still + host.loading)),
        **(reference if "reference" in KINDS[config.stage].names else {}),
        "step": Phase(held.still + held.training, ranks * host.still),
        "gather": Phase(held.still + gathered, ranks * host.still),
        "export": Phase(held.still + gathered, ranks * host.still + (GROUP if sharding.export else 2 * size.parameters)),
        "save": Phase(held.still, ranks * (host.still + host.saving)),
    }


def _host(config: PPO, name: str, sizes: Mapping[str, Size], gpu: Gpu, sharding: Sharding) -> _Host:
    size, ranks, head = sizes[name], config.groups[name].world_size, name in ("actor", "reference")
    if name in ("actor", "critic"):
        assert config.zero_stage != "auto", "decided before (zero_stage.py)"
        offloads = {"offload": name in config.adam_offload, "on_host": name in config.param_offload}
        how = Training(ranks, config.zero_stage, 0.0, 0, adapters=config.lora is not None, sharding=sharding, **offloads)
        return _trained_on_host(size, how, head, gpu)
    count = size.parameters - (0 if head else size.head)
    over = ranks if sharding.frozen or config.ref_reward_shard else 1
    share = count / over
    if config.ref_reward_offload:
        return _Host(PROCESS + 2 * share)
    return _Host(PROCESS, _loaded(size, count, over, gpu))


def _trained_on_host(size: Size, how: Training, head: bool, gpu: Gpu) -> _Host:
    count = size.parameters - (0 if head else size.head)
    loading = _loaded(size, count, how.ranks if how.sharding.load and how.zero_stage == 3 else 1, gpu)
    if how.adapters:
        return _Host(PROCESS, loading)
    still = (HELD_BY_ADAM if how.offload else 0.0) * count / how.ranks + (2 if how.on_host else 0) * count / how.ranks
    # torch.save brings one tensor at a time to the host.
    return _Host(PROCESS + still, loading, 0.0 if how.offload else 4 * count / how.ranks)


def _loaded(size: Size, count: float, shares: int, gpu: Gpu) -> float:
    """Bytes of a model on its way through host memory."""
    if 2 * count < DIRECT * gpu.memory:
        return 0.0
    return 2 * (count if shares == 1 else min(count, count / shares + 2 * largest_layer(size)))
