"""Runs one rank of a worker group in a process of its own: makes the object of its role and calls its
methods."""

from __future__ import annotations

import atexit
import gc
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
from rlhf_core.runs.allotment import CORES_ENV
from rlhf_core.system import progress
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.gpu_allocator import give_up_segments
from rlhf_core.system.machine import free_memory, num_cpus
from rlhf_core.system.processes import raised_by_us


def cpu_threads(side_by_side: int) -> int:
    """Returns how many threads one of `side_by_side` processes gets: its part of the stage's cores, or of
    those of this node (of this container, where that has a quota)."""
    return max(1, int(os.environ.get(CORES_ENV) or num_cpus()) // side_by_side)


class LibraryError(RuntimeError):
    """Stands for a ValueError that a library raised. Unlike one of ours it does not say what the user must
    change."""


@contextmanager
def mark_library_errors() -> Iterator[None]:
    """Raises LibraryError in place of a ValueError that is not ours."""
    try:
        yield
    except ValueError as error:
        if raised_by_us(error):
            raise
        raise LibraryError(f"{type(error).__name__}: {error}") from error


class RankReady(NamedTuple):
    """Says that a rank is ready: the id of its process, and the seconds that its imports and its loading
    took."""

    process: int
    imports: float
    loading: float


class Worker:
    """Runs one rank: `build` makes the role's object, `call` runs one of its methods. `side_by_side`:
    processes that share the cores of this node; `key`: under which the rank reports progress."""

    def __init__(self, name: str, side_by_side: int, expandable_segments: bool, key: str):
        self._name = name
        self._unprepared: Exception | None = None
        self._imports = 0.0
        # before anything is imported that reads it
        os.environ["OMP_NUM_THREADS"] = str(cpu_threads(side_by_side))
        if not expandable_segments:
            give_up_segments(os.environ)
        use_card_of(ray.util.get_node_ip_address())
        end_when_alone([head(), own_node()])
        report(key)

    def __repr__(self) -> str:  # Ray puts this before each relayed log line
        return self._name

    def prepare(self, function: str, *args: Any) -> None:
        """Calls `module:function`, whose module need not be imported in the calling process."""
        module, _, name = function.partition(":")
        start = time.monotonic()
        try:
            with uncollected():
                getattr(importlib.import_module(module), name)(*args)
            gc.freeze()  # engines run full collections while they start, which need not scan the libraries
            atexit.register(gc.unfreeze)  # some of these count what is left of them at the end
        except Exception as error:  # for `build` to raise, which somebody waits for
            self._unprepared = error
        self._imports = time.monotonic() - start

    def store_address(self) -> str:
        """Address of a store for the ranks of a group of which this one is the first."""
        return store_address(ray.util.get_node_ip_address())

    def gpu_ids(self) -> list[str]:
        """Returns the GPUs of this process, as its node counts them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def gpu_bytes(self) -> int:
        """Returns the bytes of this process's GPU; 0 without one."""
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0

    def host_bytes(self) -> int:
        """Returns the bytes of host memory that are free on this process's node."""
        return free_memory()

    def follow(self, *built: Any) -> None:
        """Makes the role's object as `build` does, and ends this process when the object's `stay` returns: it
        has failed."""
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
        """Makes the role's object. `store`: address of the store in which the ranks find each other. `gpus`:
        for an engine over several GPUs, the ids of its GPUs, by slot. `stage`: of an engine of several
        stages, its number and how many there are; `address`: that of their store."""
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

    def call(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        """Returns the method's result and the seconds it took. Results are in host memory, so the GPU has
        finished too."""
        start = time.monotonic()
        with mark_library_errors():
            result = getattr(self.role, method)(*args, **kwargs)
        return result, time.monotonic() - start

    def call_after(self, method: str, count: int, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        """Does `call` without the first `count` arguments, which Ray waited for."""
        return self.call(method, *args[count:], **kwargs)

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, float]]:
        """Yields what the method yields, each with the seconds since its start."""
        start = time.monotonic()
        with mark_library_errors():
            for item in getattr(self.role, method)(*args, **kwargs):
                progress.made()
                yield item, time.monotonic() - start
