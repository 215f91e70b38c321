"""Sends weights from the trainer's ranks to the engines in buckets, so that the transfer needs memory for
only one or two buckets.

There are three routes. `gpus`: every engine process is on a GPU with a trainer rank, which shares each bucket
with it through CUDA IPC. `nccl`: one trainer rank broadcasts over NCCL to engines on other GPUs (NCCL refuses
two ranks on one GPU). `gloo`: the same broadcast through host memory, on machines without GPUs and for all
other placements. The channel opens once and serves every sync. At the end of a sync the checksums of the sent
and the received weights are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlhf_core.cluster.rank_environment import open_store
from rlhf_core.system import progress
from rlhf_core.system.gpu_allocator import shared_bytes, wants_segments

BUCKET_BYTES = 512 << 20
DEVICE_ARGUMENT = 6  # index in `rebuild_cuda_tensor`'s arguments (PyTorch): the device to open the memory on
ALIGNMENT = 16  # bytes: every weight of a bucket can be viewed in its own dtype

Named = Iterator[tuple[str, Tensor]]


class ChecksumMismatch(RuntimeError):
    """Raised when the received weights differ from the weights that were sent."""


class Route(NamedTuple):
    """Describes how weights are sent. `source`: the trainer rank that is rank 0 of the channel and sends
    (with `gpus` every rank sends); `receivers`: the number of engine processes."""

    kind: Literal["gpus", "nccl", "gloo"]
    source: int
    receivers: int


class Rendezvous(NamedTuple):
    """Describes where trainer and engines connect: the address of the source's store and, for `gpus`, a key
    and the socket of the trainer rank on each GPU."""

    address: str
    sockets: Mapping[str, str]
    key: bytes
    timeout: float


class BucketEntry(NamedTuple):
    """Describes one weight in a bucket, `start` bytes from its beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def gpu_uuid() -> str | None:
    """Returns the UUID of this process's GPU, which is the same in all processes on that GPU; None on CPU."""
    return (
        str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if torch.cuda.is_available()
        else None
    )


def choose_route(trainer: Sequence[str | None], engines: Sequence[str | None]) -> Route:
    """Returns the fastest route from the GPUs of the trainer's ranks to the GPUs of the engines' processes
    (None: no GPU)."""
    if None in trainer or None in engines:
        return Route("gloo", 0, len(engines))
    if set(engines) <= set(trainer):
        return Route("gpus", 0, len(engines))
    ranks_without_engine = [rank for rank, gpu in enumerate(trainer) if gpu not in engines]
    if ranks_without_engine and len(set(engines)) == len(engines):
        return Route("nccl", ranks_without_engine[0], len(engines))
    return Route("gloo", 0, len(engines))


class Broadcast:
    """Sends weights over `nccl` or `gloo`: rank 0 of this channel sends, and the other ranks receive. A
    header precedes each bucket, and an empty header ends the sync."""

    def __init__(self, backend: Literal["nccl", "gloo"], rank: int, size: int, rendezvous: Rendezvous):
        patience = timedelta(seconds=rendezvous.timeout)
        # A separate communicator: it neither needs nor touches the process groups of trainer and engine.
        store = open_store(rendezvous.address, rank, size, patience)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, patience)
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")

    def send(self, weights: Named) -> None:
        sums = Sums()
        for entries, data in to_buckets(weights, self._device):
            sums.add(data)
            header = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8).to(
                self._device
            )
            for part in (torch.tensor([len(header), len(data)], device=self._device), header, data):
                self._broadcast(part)
        self._broadcast(torch.tensor([0, sums.total()], device=self._device))
        _finish()

    def receive(self) -> Named:
        sums = Sums()
        while True:
            sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._broadcast(sizes)
            header_size, size = sizes.tolist()
            if not header_size:
                sums.compare(size)
                return
            header, data = (
                torch.empty(length, dtype=torch.uint8, device=self._device) for length in (header_size, size)
            )
            self._broadcast(header)
            self._broadcast(data)
            sums.add(data)
            progress.made()
            yield from from_bucket(
                [BucketEntry(*entry) for entry in json.loads(bytes(header.tolist()))], data
            )

    def _broadcast(self, data: Tensor) -> None:
        self._group.broadcast(data, 0).wait()


class SameGpu:
    """Shares each bucket with the engine processes on this GPU through CUDA IPC (route `gpus`). They copy it
    before the next bucket overwrites it.

    A handle names its device by the sender's index, but each process numbers only the GPUs it sees. The
    receiver computes on the same GPU, so it opens the memory on its own current device and synchronises that
    device.
    """

    def __init__(self, connections: Sequence[Connection]):
        self._connections = connections

    def send(self, weights: Named) -> None:
        sums = Sums()
        for entries, data in to_buckets(weights, torch.device("cuda")):
            sums.add(data)
            _finish()
            for connection in self._connections:
                connection.send((entries, *reduce_tensor(data)))
            for connection in self._connections:
                connection.recv()
        for connection in self._connections:
            connection.send(sums.total())

    def receive(self) -> Named:
        (connection,), sums, device = self._connections, Sums(), torch.cuda.current_device()
        while not isinstance(message := connection.recv(), int):
            entries, rebuild, rebuild_arguments = message
            shared = rebuild(
                *rebuild_arguments[:DEVICE_ARGUMENT], device, *rebuild_arguments[DEVICE_ARGUMENT + 1 :]
            )
            data = shared.clone()
            torch.cuda.synchronize(device)
            del shared, rebuild_arguments
            connection.send(True)
            sums.add(data)
            progress.made()
            yield from from_bucket(entries, data)
        sums.compare(message)


Channel = Broadcast | SameGpu  # one side of an open route


class Sums:
    """Accumulates the checksum of a sync's buckets. This is the sum modulo 2^64 of their bytes read as 64-bit
    numbers, with trailing bytes added one by one."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, data: Tensor) -> None:
        if data.storage_offset() % 8:  # a weight larger than a bucket is not copied into one
            data = data.clone()
        whole = len(data) // 8 * 8
        self._sums += [data[:whole].view(torch.int64).sum(), data[whole:].sum()]

    def total(self) -> int:
        return int(torch.stack(self._sums).sum()) if self._sums else 0

    def compare(self, sent: int) -> None:
        """Raises ChecksumMismatch when `sent`, the sender's total, differs."""
        arrived = self.total()
        if arrived != sent:
            raise ChecksumMismatch(
                f"the weights that arrived are not those that the actor sent (checksums {arrived:x} and"
                f" {sent:x}, {len(self._sums) // 2} buckets): resume the run, and look at the machine's"
                " memory and links if it comes again"
            )


def to_buckets(
    weights: Named, device: torch.device, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[list[BucketEntry], Tensor]]:
    """Yields weights in buckets of at most `bucket_bytes` bytes, uint8 on `device`. A larger weight gets its
    own bucket.

    A bucket is overwritten when the next one is requested.
    """
    buffer: Tensor | None = None
    entries: list[BucketEntry] = []
    used = 0
    for name, weight in weights:
        data = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        entry = BucketEntry(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), used)
        if used + len(data) > bucket_bytes and entries:
            assert buffer is not None
            yield entries, buffer[:used]
            entries = []
            used = 0
        if len(data) > bucket_bytes:
            yield (
                [entry._replace(start=0)],
                (shared_bytes(len(data), device).copy_(data) if wants_segments() else data.to(device)),
            )
            continue
        if buffer is None:
            buffer = shared_bytes(bucket_bytes, device)
        buffer[used : used + len(data)].copy_(data)
        entries.append(entry._replace(start=used))
        used += -(-len(data) // ALIGNMENT) * ALIGNMENT
    if entries and buffer is not None:
        yield entries, buffer[: min(used, bucket_bytes)]


def from_bucket(entries: Sequence[BucketEntry], data: Tensor) -> Named:
    """Yields views of the weights in a bucket."""
    for entry in entries:
        dtype: torch.dtype = getattr(torch, entry.dtype)
        size = dtype.itemsize * math.prod(entry.shape)
        yield entry.name, data[entry.start : entry.start + size].view(dtype).view(entry.shape)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
