"""Worker groups: the ranks of one role, each a Ray actor that holds a plain object of ours.

A call goes to every rank and returns at once; waiting ends when a rank makes no progress for a time, and names role and phase. Arguments
may be references from `share`, so that a batch crosses to each node once.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.rank_environment import LESS_MEMORY, free_port, set_rank_environment
from rlhf_core.cluster.ray_cluster import Reservation, connect, is_ours, passed_environment, reserve
from rlhf_core.cluster.signs import Silent, Watch, report
from rlhf_core.config import Ranks
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system import progress
from rlhf_core.system.gc_pause import uncollected
from rlhf_core.system.gpu_allocator import give_up_segments
from rlhf_core.system.processes import raised_by_us

P = ParamSpec("P")
R = TypeVar("R")


class RoleFailed(RuntimeError):
    """A role died, raised or stayed silent; the message names role and phase."""


class LibraryError(RuntimeError):
    """A library's ValueError: not about what the user gave, as ours are."""


@contextmanager
def mark_library_errors() -> Iterator[None]:
    """Raises LibraryError in place of a ValueError that is not ours."""
    try:
        yield
    except ValueError as error:
        if raised_by_us(error):
            raise
        raise LibraryError(f"{type(error).__name__}: {error}") from error


class Up(NamedTuple):
    """A rank that is ready: its process, and the seconds that its imports and its loading took."""

    process: int
    imports: float
    loading: float


class Worker:
    """One rank. `build` makes the role's object in this process; `call` runs one of its methods. `key`: what it reports progress under."""

    def __init__(self, name: str, threads: int, growing: bool, key: str):
        self._name = name
        self._unprepared: Exception | None = None
        self._imports = 0.0
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before anything is imported that reads it
        if not growing:
            give_up_segments(os.environ)
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

    def address(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), free_port()

    def gpu_ids(self) -> list[str]:
        """The GPUs of this process, as its node counts them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def gpu_bytes(self) -> int:
        """Memory of this process's GPU; 0 without one."""
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0

    def build(
        self, rank: int, world_size: int, local_rank: int, rendezvous: tuple[str, int], factory: Any, options: Any, *gpus: list[str]
    ) -> Up:
        """`rendezvous`: address and port at which the ranks connect. `gpus`: the GPUs that an engine over several sees, by slot."""
        start = time.monotonic()
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for place in gpus for gpu in place)
        if self._unprepared is not None:
            with mark_library_errors():
                raise self._unprepared
        set_rank_environment(rank, world_size, *rendezvous, local_rank)
        with mark_library_errors():
            self.role = factory(**options)
        return Up(os.getpid(), self._imports, time.monotonic() - start)

    def call(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        """The method's result and the seconds it took; results are in host memory, so the device has finished too."""
        start = time.monotonic()
        with mark_library_errors():
            result = getattr(self.role, method)(*args, **kwargs)
        return result, time.monotonic() - start

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, float]]:
        """What the method yields, each with the seconds since it began."""
        start = time.monotonic()
        with mark_library_errors():
            for item in getattr(self.role, method)(*args, **kwargs):
                progress.made()
                yield item, time.monotonic() - start


class Pending(NamedTuple, Generic[R]):
    """Work under way on ranks of a group, `keys` their reports. `spent`, if there is one, takes the seconds of the slowest rank under the
    phase's name."""

    role: str
    phase: str
    refs: list[Any]
    keys: Sequence[str]
    spent: dict[str, float] | None = None

    def wait(self, timeout: float) -> list[R]:
        """The results by rank. Raises RoleFailed as soon as one rank failed, or made no progress for `timeout` seconds."""
        return wait_all([self], timeout)[0]

    def results(self) -> list[Any]:
        """The results of finished work, by rank."""
        results = [self.get(ref) for ref in self.refs]
        if self.spent is None:
            return results
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + max(seconds for _, seconds in results)
        return [value for value, _ in results]

    def get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RoleFailed(
                f"a rank of {self.role} died during '{self.phase}', often for lack of memory: lower its batch sizes. {error}"
            ) from None
        except ray.exceptions.RayTaskError as error:
            for kind in (ValueError, FloatingPointError):
                if isinstance(error.cause, kind):
                    raise kind(f"{self.role}: {error.cause}") from None
            if type(error.cause).__name__ == "OutOfMemoryError":
                raise RoleFailed(f"{self.role} ran out of GPU memory in '{self.phase}': {LESS_MEMORY}. {error.cause}") from None
            raise RoleFailed(f"{self.role} failed in '{self.phase}': {error.cause!r}\n{error}") from None


def wait_all(pending: Sequence[Pending[Any]], timeout: float) -> list[list[Any]]:
    """The results of several groups that work at once, by group and rank. Raises RoleFailed as soon as one rank of any failed, or made no
    progress for `timeout` seconds."""
    owner = {ref: work for work in pending for ref in work.refs}
    watch = Watch({ref: key for work in pending for ref, key in zip(work.refs, work.keys, strict=True)}, timeout)
    waiting = list(owner)
    while waiting:
        try:
            ready, waiting = watch.next(waiting)
        except Silent as silent:
            raise _silent(pending, silent, timeout) from None
        if waiting:  # the others may be waiting for a rank that failed
            owner[ready].get(ready)
    return [work.results() for work in pending]


def _silent(pending: Sequence[Pending[Any]], silent: Silent, timeout: float) -> RoleFailed:
    who = " and ".join(
        f"{work.role}: ranks {[rank for rank, ref in enumerate(work.refs) if ref in silent.refs]} made no progress in '{work.phase}'"
        for work in pending
        if any(ref in silent.refs for ref in work.refs)
    )
    return RoleFailed(f"{who} for {timeout:.0f} s; raise `timeout` if this is normal")


class Group:
    """All ranks of one role in their slots. An engine over several GPUs is one rank; the processes on its other GPUs only reserve them.
    `growing`: whether their memory may be in segments that grow, where the user sets it (`rlhf_core.system.gpu_allocator`)."""

    def __init__(self, name: str, reservation: Reservation, threads: int, span: int = 1, growing: bool = True):
        self.name, slots = name, reservation.slots[name]
        self.world_size, keys = len(slots) // span, [uuid.uuid4().hex for _ in slots]
        # Processes of a cluster of our own have our environment anyway, and start at once where Ray need not make one for them.
        environment = None if is_ours() else {"env_vars": passed_environment()}
        self._processes = [
            ray.remote(Worker)
            .options(
                num_cpus=slot.cpus,
                num_gpus=slot.gpus,
                runtime_env=environment,
                scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=slot.bundle),
            )
            .remote(f"{name}{i // span}" if self.world_size > 1 else name, threads, growing, key)
            for i, (slot, key) in enumerate(zip(slots, keys, strict=True))
        ]
        self._span, self._workers, self._keys = span, self._processes[::span], keys[::span]
        self._spent: dict[str, float] = {}

    def prepare(self, function: str, *args: Any) -> None:
        """Lets every rank call `module:function`, to import what it will need, and does not wait. An engine over several GPUs does not:
        what it imports may look for GPUs before `build` sets which it sees."""
        if self._span == 1:
            for worker in self._workers:
                worker.prepare.remote(function, *args)

    def build(self, factory: Callable[..., Any], **options: Any) -> Pending[Up]:
        """Makes the role's object on every rank; ranks connect at the first one's address. The results are `Up`."""
        rendezvous = self._workers[0].address.remote()  # Ray passes the result of a reference, so this does not wait
        gpus = [worker.gpu_ids.remote() for worker in self._processes] if self._span > 1 else []
        refs = []
        for rank, worker in enumerate(self._workers):
            # Ray shows each worker only its own GPUs, so the device index is always 0 there.
            local_rank = 0 if ray.cluster_resources().get("GPU") else rank
            seen = gpus[rank * self._span : (rank + 1) * self._span]
            refs.append(worker.build.remote(rank, self.world_size, local_rank, rendezvous, factory, options, *seen))
        return Pending(self.name, "load", refs, self._keys)

    def address(self, rank: int, timeout: float) -> tuple[str, int]:
        """The node of a rank and a free port there."""
        return Pending[tuple[str, int]](self.name, "address", [self._workers[rank].address.remote()], [self._keys[rank]]).wait(timeout)[0]

    def gpu_bytes(self, timeout: float) -> int:
        """Memory of the smallest GPU of the group; 0 without GPUs."""
        return min(Pending[int](self.name, "start", [worker.gpu_bytes.remote() for worker in self._workers], self._keys).wait(timeout))

    def call(self, phase: str, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Runs a method of the role's class on every rank's object, or what a subclass has under its name."""
        refs = [worker.call.remote(method.__name__, *args, **kwargs) for worker in self._workers]
        return Pending(self.name, phase, refs, self._keys, self._spent)

    def stream(
        self, phase: str, timeout: float, method: Callable[Concatenate[Any, P], Iterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[R]:
        """What the method, as for `call`, yields on the ranks, as it comes. Raises RoleFailed, as `wait_all` does."""
        working = [worker.stream.options(num_returns="streaming").remote(method.__name__, *args, **kwargs) for worker in self._workers]
        waiting, slowest = list(working), 0.0
        work = Pending[Any](self.name, phase, working, self._keys)
        watch = Watch(dict(zip(working, self._keys, strict=True)), timeout)
        while waiting:
            try:
                ready, _ = watch.next(waiting)
            except Silent as silent:
                raise _silent([work], silent, timeout) from None
            try:
                item, seconds = work.get(next(ready))
            except StopIteration:
                waiting.remove(ready)
                continue
            slowest = max(slowest, seconds)
            yield item
        self._spent[phase] = self._spent.get(phase, 0.0) + slowest

    def spent(self) -> dict[str, float]:
        """Seconds of work by phase since the last call: the slowest rank's, without waiting for other groups."""
        spent = dict(self._spent)
        self._spent.clear()
        return spent


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


def run_on_group(
    work: Callable[[StageRequest, RunDir], Outcome], name: str, run: RunDir, ranks: Ranks, resolve: Callable[[int], StageRequest]
) -> Outcome:
    """Runs `work` on every rank of a worker group called `name` and returns rank 0's outcome. `resolve` gives the request, from the
    bytes of the group's smallest GPU (0: there is none)."""
    connect()
    group = Group(name, reserve(arrange({name: ranks}), timeout=600), cpu_threads(ranks.world_size))
    request = resolve(group.gpu_bytes(600))
    group.build(StageRank, work=work, request=request, path=str(run.path)).wait(600)
    return group.call("train", StageRank.run).wait(timeout=7 * 24 * 3600)[0]
