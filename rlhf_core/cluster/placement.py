"""A Ray cluster (the one at RAY_ADDRESS, or one of this process) and room on it for every rank of a stage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from rlhf_core.config import Ranks, Vllm
from rlhf_core.machine import num_gpus

# Settings of the libraries, by how their names begin.
KEPT = tuple("NCCL_ TORCH_ NVSHMEM_ CUDA_ VLLM_ HF_ DS_ GLOO_ GOMP_ PYTHON RAY_ TRANSFORMERS_ TOKENIZERS_ TQDM_".split())
# Set explicitly: some hosts show less memory than they have. On GPU hosts a whole model passes through it.
OBJECT_STORE_BYTES, GPU_OBJECT_STORE_BYTES = 512 << 20, 32 << 30


class Room(NamedTuple):
    """Placement of all groups: `first[name]` is the bundle of the group's first rank."""

    group: PlacementGroup
    first: Mapping[str, int]


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS or starts a private one that ends with this process."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the work, not a guest of it
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=True, logging_level="WARNING")
        return
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    store = GPU_OBJECT_STORE_BYTES if num_gpus() else OBJECT_STORE_BYTES
    ray.init(num_cpus=os.cpu_count(), include_dashboard=False, object_store_memory=store, logging_level="WARNING")


def passed_environment() -> dict[str, str]:
    """Variables every worker inherits: libraries' settings, among them those that keep NVLink multicast off."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(KEPT) and name != "RAY_ADDRESS"}
    for noise in ("RAY_JOB_ID", "RAY_RAYLET_PID", "CUDA_VISIBLE_DEVICES"):
        kept.pop(noise, None)
    return kept


def reserve(groups: Mapping[str, Ranks | Vllm], timeout: float) -> Room:
    """Reserves a bundle for each rank, nodes filled one after the other.

    Raises ValueError when the cluster will never have the room, TimeoutError when it has not within `timeout` seconds.
    """
    bundles: list[dict[str, float]] = []
    first: dict[str, int] = {}
    for name, wanted in groups.items():
        first[name] = len(bundles)
        count = wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines
        bundles += [{"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if wanted.gpus else {})] * count
    missing = shortage(bundles, ray.cluster_resources())
    if missing:
        raise ValueError(f"the cluster lacks {missing} for {describe(groups)}: lower cpus/gpus of these groups or add nodes")
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout):
        free = ray.available_resources()
        raise TimeoutError(
            f"waited {timeout:.0f} s for room for {describe(groups)}: free now are {free.get('CPU', 0):g} CPUs and "
            f"{free.get('GPU', 0):g} GPUs, others hold the rest"
        )
    return Room(group, first)


def shortage(bundles: Sequence[Mapping[str, float]], there: Mapping[str, float]) -> str:
    """What the cluster does not have at all, in words; empty when everything fits."""
    parts = []
    for resource in ("CPU", "GPU"):
        asked = sum(bundle.get(resource, 0.0) for bundle in bundles)
        if asked > there.get(resource, 0.0) + 1e-6:
            parts.append(f"{resource}s (asked {asked:g}, there are {there.get(resource, 0.0):g})")
    return " and ".join(parts)


def describe(groups: Mapping[str, Ranks | Vllm]) -> str:
    return ", ".join(
        f"{name} {wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines} x ({wanted.cpus:g} CPU, {wanted.gpus:g} GPU)"
        for name, wanted in groups.items()
    )
