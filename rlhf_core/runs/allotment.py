"""Holds the environment variables and the stop signal of a stage that runs alongside others.

Such a stage runs in a thread. Signals do not reach threads, so code that waits in such a thread calls
`check_stop` at least every second.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

CORES_ENV = "ALIGNFLOW_CORES"  # number of CPU cores for a stage that shares the machine with others


class Stopped(BaseException):
    """Raised in a stage's thread when the stage's run ends. Like KeyboardInterrupt, this is not a failure of
    the stage."""


@dataclass(frozen=True)
class Allotment:
    """The environment and stop signal that a run assigns to a stage. `variables`: environment variables of
    the stage's process, which override the run's; `stop`: set when the run ends."""

    variables: Mapping[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)


allotment: ContextVar[Allotment | None] = ContextVar("allotment", default=None)


def variables() -> Mapping[str, str]:
    """Returns the environment variables for a process that this thread starts for its stage; empty in the
    main thread."""
    found = allotment.get()
    return found.variables if found else {}


def check_stop() -> None:
    """Raises Stopped when the run of this thread's stage ends."""
    found = allotment.get()
    if found and found.stop.is_set():
        raise Stopped("the run was ended")
