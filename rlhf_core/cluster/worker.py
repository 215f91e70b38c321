"""Runs one rank of a worker group in its own process: creates the role's object and calls its methods."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray

from rlhf_core.cluster.progress_watch import report
from rlhf_core.cluster.rank_environment import set_rank_environment, store_address, use_card_of
from rlhf_core.cluster.reach import end_when_alone, head, own_node
from rlhf_core.cluster.work_log import RankTime
from rlhf_core.runs.allotment import CORES_ENV
from rlhf_core.system import progress
from rlhf_core.system.gc_pause import freeze_libraries, uncollected
from rlhf_core.system.gpu_allocator import give_up_segments
from rlhf_core.system.machine import free_memory, num_cpus
from rlhf_core.system.processes import raised_by_us


def cpu_threads(side_by_side: int) -> int:
    """Returns the number of threads for one of `side_by_side` processes: its share of the stage's cores or of
    this node's cores (or of the container's quota, if there is one)."""
    return max(1, int(os.environ.get(CORES_ENV) or num_cpus()) // side_by_side)


class LibraryError(RuntimeError):
    """Wraps a ValueError raised by a library. Unlike a ValueError of our code, it does not tell users what to
    change."""


@contextmanager
def mark_library_errors() -> Iterator[None]:
    """Replaces any ValueError that a library raises by LibraryError."""
    try:
        yield
    except ValueError as error:
        if raised_by_us(error):
            raise
        raise LibraryError(f"{type(error).__name__}: {error}") from error


class RankReady(NamedTuple):
    """The report of a rank that is ready: its process ID, and the seconds that importing and loading took."""

    process: int
    imports: float
    loading: float


class Worker:
    """Runs one rank: `build` creates the role's object, `call` runs one of its methods. `side_by_side`: the
    number of processes that share this node's cores. `key`: the key under which the rank reports progress."""

    def __init__(self, name: str, side_by_side: int, expandable_segments: bool, key: str):
        self._name = name
        self._unprepared: Exception | None = None
        self._imports = 0.0
        # before anything that reads it is imported
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads(side_by_side))
        if not expandable_segments:
            give_up_segments(os.environ)
        use_card_of(ray.util.get_node_ip_address())
        end_when_alone([head(), own_node()])
        report(key)

    def __repr__(self) -> str:  # Ray puts this before each log line that it relays
        return self._name

    def prepare(self, function: str, *args: Any) -> None:
        """Calls `module:function`, which the calling process need not have imported. `build` raises any error
        from it."""
        module, _, name = function.partition(":")
        start = time.monotonic()
        try:
            with uncollected():
                getattr(importlib.import_module(module), name)(*args)
            freeze_libraries()
        except Exception as error:  # `build` raises it, because its result is awaited
            self._unprepared = error
        self._imports = time.monotonic() - start

    def store_address(self) -> str:
        """Returns the address of a store for the ranks of a group in which this rank is the first."""
        return store_address(ray.util.get_node_ip_address())

    def gpu_ids(self) -> list[str]:
        """Returns the GPUs of this process, numbered as on its node."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def gpu_bytes(self) -> int:
        """Returns the memory of this process's GPU in bytes; 0 if it has none."""
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0

    def host_bytes(self) -> int:
        """Returns the free host memory of this process's node in bytes."""
        return free_memory()

    def follow(self, *built: Any) -> None:
        """Creates the role's object like `build`, and ends this process when the object's `stay` returns,
        because a return means that the engine has failed."""
        self.build(*built)
        self.role.stay()
        print(
            f"a pipeline stage of {self._name} ended: the lines of its Worker_PP processes say why",
            flush=True,
        )
        ray.actor.exit_actor()

    def build(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        store: str,
        factory: Any,
        options: Any,
        stage: Any = (),
        address: str = "",
        *gpus: list[str],
    ) -> RankReady:
        """Creates the role's object.

        `store`: address of the store through which the ranks find each other. `gpus`: for an engine over
        several GPUs, the IDs of its GPUs, by slot. `stage`: for an engine with several pipeline stages, this
        stage's number and the number of stages. `address`: the address of the stages' store.
        """
        start = time.monotonic()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for place in gpus for gpu in place)
        if self._unprepared is not None:
            with mark_library_errors():
                raise self._unprepared
        set_rank_environment(rank, world_size, store, local_rank)
        with mark_library_errors():
            self.role = factory(**options, **({"stage": (*stage, address)} if stage else {}))
        return RankReady(os.getpid(), self._imports, time.monotonic() - start)

    def call(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, RankTime]:
        """Returns the method's result and the time that it took. Results are in host memory, so the GPU has
        also finished by then."""
        begin = time.time()
        start = time.monotonic()
        with mark_library_errors():
            result = getattr(self.role, method)(*args, **kwargs)
        return result, RankTime(begin, time.monotonic() - start)

    def call_after(self, method: str, count: int, *args: Any, **kwargs: Any) -> tuple[Any, RankTime]:
        """Works like `call`, but drops the first `count` arguments, which only make Ray wait for them."""
        return self.call(method, *args[count:], **kwargs)

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, RankTime]]:
        """Yields the items that the method yields, each with the time since the start."""
        begin = time.time()
        start = time.monotonic()
        with mark_library_errors():
            for item in getattr(self.role, method)(*args, **kwargs):
                progress.made()
                yield item, RankTime(begin, time.monotonic() - start)
