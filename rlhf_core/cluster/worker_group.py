"""Starts and calls worker groups. A group is the ranks of one role, each a Ray actor that holds one Python
object.

A call goes to every rank and returns immediately. If a rank makes no progress for too long, waiting for the
call raises an error that names the role and the phase. Arguments may be references from `put_on_nodes`, so
that a batch is sent to each node only once.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.pending import Pending, _notice, _show, _silent
from rlhf_core.cluster.progress_watch import Silent, Watch
from rlhf_core.cluster.ray_cluster import (
    Reservation,
    connect,
    is_ours,
    passed_environment,
    reserve,
)
from rlhf_core.cluster.work_log import GroupWork, RankTime, WorkLog
from rlhf_core.cluster.worker import RankReady, Worker
from rlhf_core.config import Ranks
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest

P = ParamSpec("P")
R = TypeVar("R")
SILENT_SECONDS = 3600  # longer than any step of a training stage that reports no progress


class WorkerGroup:
    """Starts all ranks of one role.

    An engine over several GPUs is one rank: `span` processes in `pipeline_stages` stages of vLLM's pipeline.
    In each stage a single process does the work (see `Worker.follow`); the processes on the stage's other
    GPUs only reserve them. `at_once`: number of roles that work at the same time; their ranks share a node's
    cores. `expandable_segments`: whether PyTorch may use expandable segments if the user turns them on
    (`rlhf_core.system.gpu_allocator`). `together`: whether the ranks wait for each other in collectives, so
    that progress by one counts for all.
    """

    def __init__(
        self,
        name: str,
        reservation: Reservation,
        at_once: int,
        span: int = 1,
        expandable_segments: bool = True,
        together: bool = False,
        pipeline_stages: int = 1,
    ):
        self.name = name
        slots = reservation.slots[name]
        self.world_size = len(slots) // span
        key = uuid.uuid4().hex
        nodes = [reservation.nodes[slot.bundle] for slot in slots]
        self.nodes = nodes[::span]  # by rank
        keys = [key if together else f"{key}-{i}" for i in range(len(slots))]
        # Processes of our own cluster already have our environment, and they start at once if Ray need not
        # create one for them.
        environment = None if is_ours() else {"env_vars": passed_environment()}

        def process(i: int) -> Any:
            slot = slots[i]
            title = f"{name}{i // span}" if self.world_size > 1 else name
            where = PlacementGroupSchedulingStrategy(
                reservation.group, placement_group_bundle_index=slot.bundle
            )
            options = {
                "num_cpus": slot.cpus,
                "num_gpus": slot.gpus,
                "runtime_env": environment,
                "scheduling_strategy": where,
            }
            return (
                ray.remote(Worker)
                .options(**options)
                .remote(title, at_once * nodes.count(nodes[i]), expandable_segments, keys[i])
            )

        self._process = process
        self._processes = [process(i) for i in range(len(slots))]
        self._span = span
        self._workers = self._processes[::span]
        self._keys = keys[::span]
        self._stages = pipeline_stages
        self._following = dict[int, list[Any]]()  # by rank: references to its other stages
        self._work = WorkLog()
        self._work_alone = [WorkLog() for _ in self._workers]  # calls made with `call_rank`

    def prepare(self, function: str, *args: Any) -> None:
        """Makes every rank call `module:function`, to import modules it will need, without waiting for it.
        Engines over several GPUs skip this, because an import may look for GPUs before `build` sets which
        GPUs are visible."""
        if self._span == 1:
            for worker in self._workers:
                worker.prepare.remote(function, *args)

    def build(self, factory: Callable[..., Any], **options: Any) -> Pending[RankReady]:
        """Creates the role's object on every rank. The ranks find each other through the first rank's
        store."""
        self._made = factory, options
        # Ray resolves the reference before passing it on, so this does not wait
        store = self._workers[0].store_address.remote()
        refs = [self._build(rank, store) for rank in range(self.world_size)]
        return Pending(self.name, "load", refs, self._keys, other_stages=self._others(range(self.world_size)))

    def _build(self, rank: int, store: Any) -> Any:
        # Ray shows each worker only its own GPUs, so the device index is always 0.
        local_rank = 0 if ray.cluster_resources().get("GPU") else rank
        own = self._processes[rank * self._span : (rank + 1) * self._span]
        size = self._span // self._stages
        numbers = [(stage, self._stages) for stage in range(self._stages)] if self._stages > 1 else [()]
        address = own[0].store_address.remote() if self._stages > 1 else ""

        def started(stage: int) -> Any:
            of_stage = own[stage * size : (stage + 1) * size]
            seen = [worker.gpu_ids.remote() for worker in of_stage] if self._span > 1 else []
            start = of_stage[0].follow if stage else of_stage[0].build
            return start.remote(
                rank, self.world_size, local_rank, store, *self._made, numbers[stage], address, *seen
            )

        first, *self._following[rank] = [started(stage) for stage in range(self._stages)]
        return first

    def _others(self, ranks: Sequence[int]) -> list[Any]:
        return [ref for rank in ranks for ref in self._following.get(rank, ())]

    def build_again(self, ranks: Sequence[int]) -> Pending[RankReady]:
        """Restarts the processes of `ranks` and creates their role's objects again, like `build`. Works only
        for ranks that do not communicate with each other."""
        for rank in ranks:
            for i in range(rank * self._span, (rank + 1) * self._span):
                ray.kill(self._processes[i])
                self._processes[i] = self._process(i)
            self._workers[rank] = self._processes[rank * self._span]
        store = self._workers[ranks[0]].store_address.remote()
        refs = [self._build(rank, store) for rank in ranks]
        keys = [self._keys[rank] for rank in ranks]
        return Pending(self.name, "load", refs, keys, other_stages=self._others(ranks))

    def store_address(self, rank: int, timeout: float) -> str:
        """Returns the address of a store that this rank opens."""
        return Pending[str](
            self.name, "address", [self._workers[rank].store_address.remote()], [self._keys[rank]]
        ).wait(timeout)[0]

    def gpu_bytes(self, timeout: float) -> int:
        """Returns the memory of the group's smallest GPU in bytes; 0 without GPUs."""
        return min(
            Pending[int](
                self.name, "start", [worker.gpu_bytes.remote() for worker in self._workers], self._keys
            ).wait(timeout)
        )

    def free_hosts(self, timeout: float) -> dict[str, int]:
        """Returns the free host memory of each node of the group in bytes."""
        free = Pending[int](
            self.name, "start", [worker.host_bytes.remote() for worker in self._workers], self._keys
        ).wait(timeout)
        return dict(zip(self.nodes, free, strict=True))

    def call(
        self, phase: str, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Starts a method of the role's class on every rank's object. If a subclass overrides the method, its
        objects run the override."""
        refs = [worker.call.remote(method.__name__, *args, **kwargs) for worker in self._workers]
        return Pending(self.name, phase, refs, self._keys, self._work, self._others(range(self.world_size)))

    def call_after(
        self,
        before: Sequence[Any],
        phase: str,
        method: Callable[Concatenate[Any, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[R]:
        """Works like `call`, but starts the method only once the references `before` are ready (see
        `after_work`)."""
        refs = [
            worker.call_after.remote(method.__name__, len(before), *before, *args, **kwargs)
            for worker in self._workers
        ]
        return Pending(self.name, phase, refs, self._keys, self._work, self._others(range(self.world_size)))

    def after_work(self) -> list[Any]:
        """Returns references that become ready once each rank has finished all calls so far, successfully or
        not."""
        return [worker.gpu_ids.remote() for worker in self._workers]

    def call_rank(
        self,
        rank: int,
        phase: str,
        method: Callable[Concatenate[Any, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[R]:
        """Works like `call`, but starts the method on only one rank."""
        ref = self._workers[rank].call.remote(method.__name__, *args, **kwargs)
        return Pending(
            self.name,
            phase,
            [ref],
            self._keys[rank : rank + 1],
            self._work_alone[rank],
            self._others([rank]),
        )

    def stream(
        self,
        phase: str,
        timeout: float,
        method: Callable[Concatenate[Any, P], Iterator[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[R]:
        """Yields the items that the method yields on the ranks, in order of arrival. Raises RoleFailed for
        the same reasons as `wait_all`."""
        working = [
            worker.stream.options(num_returns="streaming").remote(method.__name__, *args, **kwargs)
            for worker in self._workers
        ]
        waiting = list(working)
        stages = self._others(range(self.world_size))
        times: dict[Any, RankTime] = {}
        work = Pending[Any](self.name, phase, working, self._keys, other_stages=stages)
        watch = Watch(
            dict(zip(working, self._keys, strict=True)),
            timeout,
            partial(_notice, [work], timeout),
            partial(_show, [work]),
        )
        while waiting:
            try:
                ready, _ = watch.next(waiting, stages)
            except Silent as silent:
                raise _silent([work], silent, timeout) from None
            if ready in stages:
                work.get(ready)
            try:
                item, times[ready] = work.get(next(ready))
            except StopIteration:
                waiting.remove(ready)
                continue
            yield item
        if times:
            self._work.add(phase, list(times.values()))

    def take_work(self) -> GroupWork:
        """Returns the work done since the last call of this method, and clears it."""
        return GroupWork(self._work.take(), [log.take() for log in self._work_alone])


class Turns:
    """Starts the work of several groups all at once or, with `in_turn`, one after another. Wait for the
    results in the order of the `start` calls."""

    def __init__(self, in_turn: bool):
        self._in_turn = in_turn
        self._before = list[Any]()

    def start(
        self,
        group: WorkerGroup,
        phase: str,
        method: Callable[Concatenate[Any, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[R]:
        if not self._in_turn:
            return group.call(phase, method, *args, **kwargs)
        work = group.call_after(self._before, phase, method, *args, **kwargs)
        self._before = group.after_work()
        return work


def put_on_nodes(value: Any) -> Any:
    """Stores a value so that Ray sends it to each node only once. Returns a reference, to be passed as an
    argument."""
    return ray.put(value)


def in_order(by_rank: Sequence[Sequence[tuple[int, R]]]) -> list[R]:
    """Returns the values of the (index, value) pairs of all ranks, ordered by index."""
    found = {index: value for share_of_rank in by_rank for index, value in share_of_rank}
    return [found[index] for index in range(len(found))]


class StageRank:
    """One rank of a training stage (SFT, reward model, DPO, KTO), in which every rank calls the same
    function."""

    def __init__(self, work: Callable[[StageRequest, RunDir], Outcome], request: StageRequest, path: str):
        self._work = work
        self._request = request
        self._path = path

    def run(self) -> Outcome:
        return self._work(self._request, RunDir(self._path))


def run_on_group(
    work: Callable[[StageRequest, RunDir], Outcome],
    name: str,
    run: RunDir,
    ranks: Ranks,
    resolve: Callable[[int, int], StageRequest],
) -> Outcome:
    """Runs `work` on every rank of a worker group called `name` and returns rank 0's outcome.

    `resolve` returns the request, given the memory of the group's smallest GPU in bytes (0: no GPU) and the
    smallest amount of free host memory on any node.
    """
    connect()
    group = WorkerGroup(name, reserve(arrange({name: ranks}), timeout=600), 1, together=True)
    request = resolve(group.gpu_bytes(600), min(group.free_hosts(600).values()))
    group.build(StageRank, work=work, request=request, path=str(run.path)).wait(600)
    return group.call("train", StageRank.run).wait(SILENT_SECONDS)[0]
