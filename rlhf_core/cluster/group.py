"""Worker groups: the ranks of one role, each a Ray actor that holds a plain object of ours.

A call goes to every rank and returns at once; waiting has a timeout and names role and phase. Arguments may be references from
`share`, so that a batch crosses to each node once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.cluster.placement import Room, connect, passed_environment, reserve
from rlhf_core.config import Ranks, Vllm
from rlhf_core.engine.ranks import free_port, set_rank_environment
from rlhf_core.stage import Outcome, RunDir, StageRequest


class RoleFailed(RuntimeError):
    """A role died, raised or stayed silent; the message names role and phase."""


class Worker:
    """One rank. `build` makes the role's object in this process; `call` runs one of its methods."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:  # Ray puts this before each relayed log line
        return self._name

    def address(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), free_port()

    def build(
        self, rank: int, world_size: int, address: str, port: int, local_rank: int, factory: Callable[..., Any], kwargs: dict[str, Any]
    ) -> None:
        set_rank_environment(rank, world_size, address, port, local_rank)
        self.role = factory(**kwargs)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.role, method)(*args)


class Pending(NamedTuple):
    """Work under way on all ranks of a group."""

    role: str
    phase: str
    refs: list[Any]

    def wait(self, timeout: float) -> list[Any]:
        """The results by rank. Raises RoleFailed as soon as one rank failed, or when `timeout` seconds pass."""
        self.wait_ready(timeout)
        return [self._get(ref) for ref in self.refs]

    def wait_ready(self, timeout: float) -> None:
        """Waits without fetching the results of the ranks that succeeded; fails as `wait` does."""
        waiting, deadline = list(self.refs), time.monotonic() + timeout
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            if not ready:
                silent = [self.refs.index(ref) for ref in waiting]
                raise RoleFailed(
                    f"{self.role}: ranks {silent} did not finish '{self.phase}' within {timeout:.0f} s; raise `timeout` if this is normal"
                )
            if waiting:  # the others may be waiting for a rank that failed
                self._get(ready[0])

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RoleFailed(
                f"a rank of {self.role} died during '{self.phase}', often for lack of memory: lower its batch sizes. {error}"
            ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise ValueError(f"{self.role}: {error.cause}") from None
            raise RoleFailed(f"{self.role} failed in '{self.phase}': {error.cause!r}\n{error}") from None


class Group:
    """All ranks of one role on their bundles."""

    def __init__(self, name: str, wanted: Ranks | Vllm, room: Room, threads: int):
        count = wanted.world_size if isinstance(wanted, Ranks) else wanted.num_engines
        self.name, self.world_size = name, count
        self._per_node = wanted.num_ranks_per_node if isinstance(wanted, Ranks) else count
        environment = passed_environment() | {"OMP_NUM_THREADS": str(threads)}
        self._workers = [
            ray.remote(Worker)
            .options(
                num_cpus=wanted.cpus,
                num_gpus=wanted.gpus,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(room.group, placement_group_bundle_index=room.first[name] + rank),
            )
            .remote(f"{name}{rank}" if count > 1 else name)
            for rank in range(count)
        ]

    def build(self, factory: Callable[..., Any], timeout: float, **kwargs: Any) -> Pending:
        """Makes the role's object on every rank; ranks meet at the first one's address."""
        address, port = Pending(self.name, "start", [self._workers[0].address.remote()]).wait(timeout)[0]
        refs = [
            worker.build.remote(rank, self.world_size, address, port, self._local_rank(rank), factory, kwargs)
            for rank, worker in enumerate(self._workers)
        ]
        return Pending(self.name, "load", refs)

    def call(self, phase: str, method: str, *args: Any) -> Pending:
        """Runs `method(*args)` on every rank."""
        return Pending(self.name, phase, [worker.call.remote(method, *args) for worker in self._workers])

    def call_each(self, phase: str, method: str, args_by_rank: list[tuple[Any, ...]]) -> Pending:
        """Runs `method` on every rank with arguments of its own."""
        calls = zip(self._workers, args_by_rank, strict=True)
        return Pending(self.name, phase, [worker.call.remote(method, *args) for worker, args in calls])

    def _local_rank(self, rank: int) -> int:
        # Ray shows each worker only its own GPUs, so the device index is always 0 there.
        return 0 if ray.cluster_resources().get("GPU") else rank % self._per_node


def share(value: Any) -> Any:
    """Puts a value where every worker can read it once per node; pass the result as an argument."""
    return ray.put(value)


def cpu_threads(roles_at_once: int) -> int:
    """Threads of one worker when `roles_at_once` of them work side by side on this machine."""
    return max(1, (os.cpu_count() or 1) // roles_at_once)


class StageRank:
    """One rank of a training stage that runs the same function everywhere (SFT, reward model, DPO)."""

    def __init__(self, work: Callable[[StageRequest, RunDir], Outcome], request: StageRequest, path: str):
        self._work, self._request, self._path = work, request, path

    def run(self) -> Outcome:
        return self._work(self._request, RunDir(self._path))


def run_on_group(work: Callable[[StageRequest, RunDir], Outcome], request: StageRequest, run: RunDir, ranks: Ranks) -> Outcome:
    """Runs `work` on every rank of a worker group and returns rank 0's outcome."""
    connect()
    room = reserve({request.name: ranks}, timeout=600)
    group = Group(request.name, ranks, room, cpu_threads(ranks.world_size))
    group.build(StageRank, 600, work=work, request=request, path=str(run.path)).wait(600)
    return group.call("train", "run").wait(timeout=7 * 24 * 3600)[0]
