"""Connects the ranks of a group: sets their environment and opens the store through which they find each
other."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from rlhf_core.cluster import LOOPBACK
from rlhf_core.system.pages.secret_file import private_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

STORE = "ALIGNFLOW_STORE"  # environment variable: address of the store of this rank's group
# Timeout of collectives, long because a rank may read or write for a long time. The wait ends earlier if no
# rank makes progress.
PATIENCE = timedelta(days=1)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE)

# Advice for when the GPU of a role or a stage runs out of memory.
LESS_MEMORY = (
    "lower micro_train_tokens or micro_train_batch_size (in PPO also those of rollouts, and"
    " engine.gpu_memory_utilization, or engine.options.batch_size of transformers), or set"
    " gradient_checkpointing, adam_offload or param_offload (in PPO also ref_reward_offload), and run again:"
    " with another value of any of these the stage goes on from its last checkpoint; `alignflow plan` with"
    " this GPU's memory says what fits"
)


_listening: dict[str, socket.socket] = {}  # by address: listening sockets of stores to open in this process


def set_rank_environment(rank: int, world_size: int, store: str, local_rank: int = 0) -> None:
    """Sets the variables that DeepSpeed and our engines read."""
    os.environ |= dict(zip(RANK_VARIABLES, (str(rank), str(world_size), str(local_rank), store), strict=True))


def use_card_of(address: str) -> None:
    """Makes gloo and vLLM use the network card with this address, unless the environment names one. By
    default they use the address of the host name, which on many machines is a loopback address."""
    os.environ.setdefault("VLLM_HOST_IP", address)
    for card, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", card)


def store_address(host: str = LOOPBACK) -> str:
    """Returns the address of a new store on this machine: a file owned by this user on a single node, a port
    of `host` on several.

    PyTorch's TCP store is unauthenticated and by default listens on all interfaces; this store listens only
    on `host`.
    """
    if host == LOOPBACK:
        return f"file://{private_folder(Path(tempfile.gettempdir()))}/ranks-{uuid.uuid4().hex}"
    listener = socket.create_server((host, 0))
    address = f"tcp://{host}:{listener.getsockname()[1]}"
    _listening[address] = listener
    return address


def open_store(address: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store at an address from `store_address`. If the address is a port, rank 0 must be the
    process that created it."""
    import torch.distributed as dist

    place = urlsplit(address)
    if place.scheme == "file":
        store = dist.FileStore(place.path, world_size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    listener = _listening.pop(address).detach() if rank == 0 else None
    host = str(place.hostname)
    port = int(place.port or 0)
    return dist.TCPStore(host, port, world_size, rank == 0, timeout, master_listen_fd=listener)  # type: ignore[attr-defined]


def serve_store(address: str) -> Store | None:
    """Opens the store at an address that `store_address` created in this process, so that other processes can
    join it, and does not wait for them. Returns None for a file, which needs no server."""
    import torch.distributed as dist

    place = urlsplit(address)
    if place.scheme == "file":
        return None
    host = str(place.hostname)
    port = int(place.port or 0)
    listener = _listening.pop(address).detach()
    return dist.TCPStore(host, port, None, True, PATIENCE, False, master_listen_fd=listener)  # type: ignore[attr-defined]


def free_port(host: str = "") -> int:
    """Returns a TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
