"""Runs the stages that flows/schedule.py starts: one at a time in the main thread, or several in the threads
of the flow's task runner.

Only the main thread receives signals; a stage that runs there ends with the signal. Stages in threads end
when a flag is set (rlhf_core/runs/allotment.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Self

from evaluation.report.summary import Status
from flows.schedule import Start, machine_here, schedule_of
from rlhf_core.config import KINDS
from rlhf_core.recipe.plan import Node, Plan
from rlhf_core.runs.allotment import Allotment, allotment
from rlhf_core.runs.prepared import prepared

POLL_SECONDS = 0.5


class Ended(NamedTuple):
    """A stage that ended. `result` returns the stage's status or raises the error that ended it; with
    `OneByOne`, the call of `result` runs the stage."""

    name: str
    result: Callable[[], Status]


def prepare_next(nodes: Sequence[Node], begun: Collection[str]) -> None:
    """Prepares the process of the next stage to run, which imports its libraries while the current stage
    works (rlhf_core/runs/prepared.py)."""
    for node in nodes:
        if node.name not in begun and not node.done:
            prepared.plan(KINDS[node.kind].package, node.kind)
            return


def prepare_first(planned: Plan, nodes: Sequence[Node]) -> None:
    """Prepares the process of the first stage that is not done, which imports its libraries while the run
    checks its inputs and starts Prefect's server. Does nothing if stages may run at the same time, because
    their environments differ."""
    if schedule_of(planned, nodes, machine_here()).peak == 1:
        prepare_next(nodes, ())
        prepared.start()


class OneByOne:
    """Runs one stage at a time, in the main thread. `work` runs a stage."""

    def __init__(self, work: Callable[[Node], Status]):
        self._work = work
        self._next: Ended | None = None

    @property
    def starts(self) -> dict[str, Start]:
        return {self._next.name: Start(self._next.name, ())} if self._next else {}

    def begin(self, node: Node, start: Start, variables: dict[str, str]) -> None:
        self._next = Ended(start.name, partial(self._work, node))

    def ended(self) -> Ended:
        assert self._next is not None
        found = self._next
        self._next = None
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing, because an exception that ends the run has already ended the stage."""


class Threads:
    """Runs several stages at the same time. `submit` hands a stage to the task runner and returns its Prefect
    future."""

    def __init__(self, submit: Callable[[Node], Any]):
        self._submit = submit
        self._stop = threading.Event()
        self._over = set[str]()
        self._one_is_over = threading.Event()
        self._futures: dict[str, Any] = {}
        self.starts: dict[str, Start] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the running stages after an exception, and waits until their processes have ended. Meanwhile
        ignores further Ctrl-C."""
        self._stop.set()
        while not self._over.issuperset(self._futures):
            with suppress(KeyboardInterrupt):
                self._one_is_over.wait(POLL_SECONDS)
                self._one_is_over.clear()

    def begin(self, node: Node, start: Start, variables: dict[str, str]) -> None:
        """Starts a stage in a thread. Its process gets `variables` in its environment."""
        token = allotment.set(Allotment(variables, self._stop))  # the thread gets a copy of this context
        try:
            future = self._submit(node)
        except Exception as error:
            future = Future[Status]()
            future.set_exception(error)
        finally:
            allotment.reset(token)
        # first, because `__exit__` waits for this callback of each future
        future.add_done_callback(lambda _: self._end(node.name))
        self._futures[node.name] = future
        self.starts[node.name] = start

    def ended(self) -> Ended:
        """Waits until a stage ends, and returns it."""
        while not (over := [name for name in self.starts if name in self._over]):
            self._one_is_over.wait(POLL_SECONDS)
            self._one_is_over.clear()
        del self.starts[over[0]]
        return Ended(over[0], self._futures[over[0]].result)

    def _end(self, name: str) -> None:
        self._over.add(name)
        self._one_is_over.set()
