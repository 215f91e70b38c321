"""Waits, with a time limit, for calls to ranks, and names the ranks that failed, died or made no progress."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from rlhf_core.cluster.progress_watch import NOTICE_SECONDS, Silent, Watch
from rlhf_core.cluster.rank_environment import LESS_MEMORY
from rlhf_core.cluster.ray_cluster import (
    dead_nodes,
)
from rlhf_core.cluster.reach import lost, reach
from rlhf_core.cluster.work_log import WorkLog
from rlhf_core.system.machine import NodeLost

R = TypeVar("R")
NODE_DIED = re.compile(r"node has (crashed|died)")  # as it appears in Ray's errors
# how long Ray may take to report a dead rank; ranks connected to it raise their own errors earlier
DEATH_SECONDS = 3.0


class RoleFailed(RuntimeError):
    """Raised when a rank has died, raised an error or made no progress. The message names the role and the
    phase."""


class RankDied(RoleFailed):
    """Raised when a rank's process has ended."""


class Pending(NamedTuple, Generic[R]):
    """References to the work that the ranks of a group are doing.

    `keys`: the key under which each rank reports progress. `work`: the log to which the ranks' time is added
    under the name of the phase. `other_stages`: references to the engines' other pipeline stages, which
    become ready only if these fail.
    """

    role: str
    phase: str
    refs: list[Any]
    keys: Sequence[str]
    work: WorkLog | None = None
    other_stages: Sequence[Any] = ()

    def wait(self, timeout: float) -> list[R]:
        """Waits and returns the results by rank. Raises RoleFailed as soon as a rank fails, or makes no
        progress for `timeout` seconds."""
        return wait_all([self], timeout)[0]

    def results(self) -> list[Any]:
        """Returns the results of finished work, by rank."""
        results = [self.get(ref) for ref in self.refs]
        if self.work is None:
            return results
        self.work.add(self.phase, [time for _, time in results])
        return [value for value, _ in results]

    def get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            if NODE_DIED.search(str(error)):
                named = ", ".join(address for address in dead_nodes() if address in str(error))
                told = (
                    f"a Ray node{f' ({named})' if named else ''} ended during '{self.phase}' of {self.role}"
                )
                raise NodeLost(
                    f"{told}: its raylet was stopped or killed, often for lack of memory; start the stage"
                    " again"
                ) from None
            gone = reach.gone()
            if gone:
                raise NodeLost(lost(gone, f"in '{self.phase}' of {self.role}")) from None
            raise RankDied(
                f"a rank of {self.role} died during '{self.phase}', often for lack of memory: lower its batch"
                f" sizes. {error}"
            ) from None
        except ray.exceptions.RayTaskError as error:
            for kind in (ValueError, FloatingPointError):
                if isinstance(error.cause, kind):
                    raise kind(f"{self.role}: {error.cause}") from None
            if type(error.cause).__name__ == "OutOfMemoryError":
                raise RoleFailed(
                    f"{self.role} ran out of GPU memory in '{self.phase}': {LESS_MEMORY}. {error.cause}"
                ) from None
            raise RoleFailed(f"{self.role} failed in '{self.phase}': {error.cause!r}\n{error}") from None


def wait_all(pending: Sequence[Pending[Any]], timeout: float) -> list[list[Any]]:
    """Waits for groups that work concurrently and returns the results by group and rank. Raises RoleFailed as
    soon as any rank fails or makes no progress for `timeout` seconds, and NodeLost when a node is lost."""
    owner = {ref: work for work in pending for ref in (*work.refs, *work.other_stages)}
    stages = [ref for work in pending for ref in work.other_stages]
    keys = {ref: key for work in pending for ref, key in zip(work.refs, work.keys, strict=True)}
    watch = Watch(keys, timeout, partial(_notice, pending, timeout), partial(_show, pending))
    waiting = [ref for work in pending for ref in work.refs]
    while waiting:
        try:
            ready, waiting = watch.next(waiting, stages)
        except Silent as silent:
            raise _silent(pending, silent, timeout) from None
        if waiting:  # other ranks may be waiting for the one that failed
            try:
                owner[ready].get(ready)
            except RoleFailed as failed:
                raise _cause(failed, owner, waiting) from None
    return [work.results() for work in pending]


def _cause(
    failed: RoleFailed, owner: Mapping[Any, Pending[Any]], waiting: list[Any]
) -> RoleFailed | NodeLost:
    """Returns the death of another rank or of a node as the cause if there was one, otherwise `failed`."""
    deadline = time.monotonic() + DEATH_SECONDS
    while not isinstance(failed, RankDied) and waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, timeout=left)
        for ref in done:
            try:
                owner[ref].get(ref)
            except (RankDied, NodeLost) as died:
                return died
            except (RoleFailed, ValueError, FloatingPointError):
                continue
    gone = reach.gone()
    return NodeLost(lost(gone, f"when a rank failed ({str(failed).splitlines()[0]})")) if gone else failed


def _silent(pending: Sequence[Pending[Any]], silent: Silent, timeout: float) -> RoleFailed:
    who = _without_progress(pending, silent.refs)
    return RoleFailed(
        f"{who} for {timeout:.0f} s; raise `timeout` (of PPO) if this is normal, else start the stage again:"
        " it resumes"
    )


def _notice(pending: Sequence[Pending[Any]], timeout: float, refs: Sequence[Any]) -> None:
    told = f"the process works on something long, or is stopped; the wait ends after {timeout:.0f} s"
    print(f"{_without_progress(pending, refs)} for {NOTICE_SECONDS:.0f} s: {told}", flush=True)


def _show(pending: Sequence[Pending[Any]], done: str) -> None:
    working = " and ".join(f"{work.role} in '{work.phase}'" for work in pending)
    print(f"{working}: {done}", flush=True)


def _without_progress(pending: Sequence[Pending[Any]], refs: Sequence[Any]) -> str:
    return " and ".join(
        f"{work.role}: ranks {[rank for rank, ref in enumerate(work.refs) if ref in refs]} made no progress"
        f" in '{work.phase}'"
        for work in pending
        if any(ref in refs for ref in work.refs)
    )
