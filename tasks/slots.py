"""Lets the stages of only one run work on a machine at a time: the run takes the machine's slot, and the
stages of other runs wait for it.

The slot is a global concurrency limit of the Prefect server, named by ALIGNFLOW_LIMIT; `alignflow serve`
creates it and sets the variable. Without the variable there is no limit. Stages of one run that work at the
same time share the slot; flows/schedule.py decides which stages fit on the machine together. A slot is freed
when the run's last stage ends, or five minutes after the run was killed with SIGKILL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

from prefect.concurrency.sync import concurrency

from rlhf_core.runs.allotment import check_stop

LIMIT_ENV = "ALIGNFLOW_LIMIT"
# Renewed after three quarters. A machine or server that stalls for longer than the rest loses the slot.
LEASE_SECONDS = 300.0
END_SECONDS = 10.0


class Slot:
    """A slot of a limit. Its own thread takes and frees it, because waiting for the server in the stage's
    thread could not be interrupted."""

    def __init__(self, name: str):
        self._name = name
        self._error = list[Exception]()
        self._taken = threading.Event()
        self._given_back = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._hold,), name=f"slot of {name}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until the slot is taken. Raises Stopped for the same reasons as `check_stop`, and Prefect's
        exception when the server has no limit of this name."""
        while not self._taken.wait(1.0):
            check_stop()
        if self._error:
            raise self._error[0]

    def free(self) -> None:
        """Frees the slot now or, if it is not taken yet, as soon as it is."""
        self._given_back.set()
        if self._taken.is_set():
            self._thread.join(END_SECONDS)

    def _hold(self) -> None:
        try:
            with concurrency(
                self._name, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
            ):
                self._taken.set()
                self._given_back.wait()
        except Exception as error:
            self._error.append(error)
            self._taken.set()


class SharedSlot:
    """The slot of this process, taken for its first stage and freed after its last one."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._stages = 0
        self._slot: Slot | None = None

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Holds the slot until the block ends. If the server fails in the meantime, the stage
        continues. Raises the same errors as `Slot.wait`."""
        while not self._turn.acquire(timeout=1.0):
            check_stop()  # another stage of this run is waiting for the slot
        try:
            self._slot = self._slot or Slot(name)
            self._stages += 1
            try:
                self._slot.wait()
            except BaseException:
                self._leave()
                raise
        finally:
            self._turn.release()
        try:
            yield
        finally:
            with self._turn:
                self._leave()

    def _leave(self) -> None:
        self._stages -= 1
        if self._slot and not self._stages:
            self._slot.free()
            self._slot = None


_shared = SharedSlot()


@contextmanager
def machine() -> Iterator[None]:
    """Holds the machine's slot for a stage until the block ends, if there is a limit."""
    name = os.environ.get(LIMIT_ENV)
    if name:
        with _shared.held(name):
            yield
    else:
        yield
