"""Joins the Ray cluster at RAY_ADDRESS or starts a cluster for this process, and reserves a place on it for
every rank of a stage."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group

from rlhf_core.cluster.layout import BundleSlot, Layout, by_node, shortage, too_large
from rlhf_core.cluster.ray_internals import SafePathJob, report_missing
from rlhf_core.cluster.reach import TcpEndpoint, answering, head, lost, place_of, reach
from rlhf_core.runs.launch import SECRET_NAME
from rlhf_core.system.machine import NodeLost, num_gpus
from rlhf_core.system.pages.secret_file import private_folder

# Prefixes of environment variables that configure libraries.
KEPT = tuple(
    "NCCL_ TORCH_ NVSHMEM_ CUDA_ VLLM_ HF_ DS_ GLOO_ GOMP_ PYTHON PYTORCH_ RAY_ TRANSFORMERS_ TOKENIZERS_"
    " TQDM_ TRITON_ TORCHINDUCTOR_".split()
)
# Set explicitly, because some hosts report less memory than they have.
OBJECT_STORE_BYTES = 512 << 20
GPU_OBJECT_STORE_BYTES = 8 << 30
KEPT_DAYS = 30  # for files of killed groups and clusters; no run takes this long
GIVEN_UP_SECONDS = 150.0  # Ray takes up to 75 s to give up on a node that does not answer
_used: frozenset[str] = frozenset()  # nodes of the latest reservation
_started = ""  # address of the cluster that `connect` last started


class Reservation(NamedTuple):
    """The result of `reserve`. `slots[name]`: the slots of a group's processes, node by node. `nodes`: the
    node of each bundle."""

    group: PlacementGroup
    slots: Mapping[str, Sequence[BundleSlot]]
    nodes: Mapping[int, str]


class RayNode(NamedTuple):
    """A node of the cluster."""

    identity: str
    address: str


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS or starts a private cluster that ends with this process."""
    if ray.is_initialized():
        return
    report_missing()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise Ray lowers the priority of its workers
    if os.environ.get("RAY_ADDRESS"):
        if os.environ.get("RAY_AUTH_MODE") != "token":
            print(
                f"warning: whoever reaches the Ray cluster at {os.environ['RAY_ADDRESS']} can run code on it:"
                " start it with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN on all nodes, and set both here",
                flush=True,
            )
        ray.init(job_config=SafePathJob(), log_to_driver=True, logging_level="WARNING")
        return
    folder = private_folder(Path("/tmp"))  # noqa: S108  short: paths of sockets have a limit
    remove_leftovers(folder)
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Otherwise Ray would start a worker for each core of the machine, and none would be used, since ranks
    # have their own environment variables.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    store = GPU_OBJECT_STORE_BYTES if num_gpus() else OBJECT_STORE_BYTES
    # "local": otherwise Ray would join the cluster started last on this machine, which may be another user's.
    ray.init(
        "local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=store,
        job_config=SafePathJob(),
        logging_level="WARNING",
        _temp_dir=str(folder / "ray"),
    )
    global _started
    _started = ray.get_runtime_context().gcs_address


def remove_leftovers(folder: Path) -> None:
    """Removes rank stores and Ray sessions that are older than KEPT_DAYS and whose process has ended. The
    last part of a session's name is its process ID."""
    for place in [*folder.glob("ranks-*"), *folder.glob("ray/session_2*")]:
        process = place.name.rpartition("_")[2]
        with suppress(OSError):
            old = time.time() - place.stat().st_mtime > KEPT_DAYS * 86400
            if not old or (process.isdigit() and psutil.pid_exists(int(process))):
                continue
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def leave() -> None:
    """Ends the cluster if `connect` started it, otherwise disconnects. After this, output of the cluster's
    processes is no longer shown. If the head of another cluster is gone, the connection stays open until this
    process ends, because Ray would wait for the head."""
    if not ray.is_initialized() or is_ours() or answering([head()]):
        ray.shutdown()
        reach.watch([])


def _nodes(identities: Collection[str] | None = None) -> list[TcpEndpoint]:
    """Returns the living nodes of the cluster, or only the nodes in `identities`."""
    living = [
        node for node in ray.nodes() if node["Alive"] and (identities is None or node["NodeID"] in identities)
    ]
    return [place_of(node) for node in living]


def _wait_for_nodes() -> None:
    """Waits until every node answers or Ray has given up on nodes that do not answer, because Ray would still
    reserve them. Raises NodeLost if this takes too long."""
    deadline = time.monotonic() + GIVEN_UP_SECONDS
    told = ""
    while (
        (nodes := _nodes())
        and (answer := answering(nodes))
        and (silent := [place for place in nodes if place not in answer])
    ):
        names = " and ".join(place.name for place in silent)
        if time.monotonic() > deadline:
            raise NodeLost(lost(names, f"for {GIVEN_UP_SECONDS:.0f} s"))
        if names != told:
            print(f"no answer from {names}: waiting for one, or until Ray has given it up", flush=True)
        told = names
        time.sleep(2)


def other_nodes() -> list[RayNode]:
    """Returns the nodes that run processes of the stage, other than this process's node; empty without a
    cluster."""
    if not ray.is_initialized():
        return []
    own = ray.get_runtime_context().get_node_id()
    there = [
        node for node in ray.nodes() if node["Alive"] and node["NodeID"] in _used and node["NodeID"] != own
    ]
    return sorted(
        (RayNode(node["NodeID"], node["NodeManagerAddress"]) for node in there), key=lambda node: node.address
    )


def dead_nodes() -> list[str]:
    """Returns the addresses of the cluster's nodes that have ended."""
    return sorted({str(node["NodeManagerAddress"]) for node in ray.nodes() if not node["Alive"]})


def is_ours() -> bool:
    """Returns whether `connect` started the cluster."""
    return ray.is_initialized() and ray.get_runtime_context().gcs_address == _started


def passed_environment() -> dict[str, str]:
    """Returns the environment variables passed to workers of another cluster: library settings, including the
    settings that keep NVLink multicast off.

    Keys and tokens are left out, because Ray writes these variables to its logs; they must be set on the
    nodes. RAY_ADDRESS tells our package not to restrict the process to a single-machine cluster.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KEPT) and not SECRET_NAME.search(name)
    }
    for noise in ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_RAYLET_PID", "CUDA_VISIBLE_DEVICES"):
        kept.pop(noise, None)
    return kept | ({"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if ray.is_initialized() else {})


def reserve(layout: Layout, timeout: float) -> Reservation:
    """Reserves the bundles of a layout, packed onto as few nodes as possible, and returns the reservation.
    From then on, the nodes are watched (see `reach`) if the cluster is not our own.

    Raises ValueError when the cluster can never hold the layout, TimeoutError when its resources are not free
    within `timeout` seconds, and NodeLost when a node does not answer.
    """
    if not is_ours():
        _wait_for_nodes()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    missing = shortage(layout.bundles, ray.cluster_resources()) or too_large(layout, nodes)
    if missing:
        raise ValueError(
            f"the cluster lacks {missing} for {layout}: lower cpus/gpus of these groups, let some share GPUs,"
            " or add nodes"
        )
    group = placement_group(list(layout.bundles), strategy="PACK")
    if not group.wait(timeout):
        free = ray.available_resources()
        raise TimeoutError(
            f"{layout} was not available within {timeout:.0f} s: free now are {free.get('CPU', 0):g} CPUs and"
            f" {free.get('GPU', 0):g} GPUs, the others are in use"
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    print(f"reserved {layout} on {len(set(node_of.values()))} node(s)", flush=True)
    global _used
    _used = frozenset(node_of.values())
    if not is_ours():
        reach.watch([head(), *_nodes(_used)])
    return Reservation(group, by_node(layout, node_of), node_of)
