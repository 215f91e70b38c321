"""Ends all processes of the driver when the process that started it ends. Standard library only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.2
ENDING_LOOKS = 10
KILLS = 100  # number of rounds, because a process may start another during the search


def begin_under_supervision(alive: int) -> None:
    """Forks, and returns in the child. The parent supervises the child. When the process at the other end of
    the pipe `alive` ends, the parent kills the child and all processes that the child started, in any
    session. When the child ends, the parent kills the other processes, then ends with the child's exit status
    or signal."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child:
        os.close(0)
        os.close(1)
        _supervise(child, alive)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(alive)


def _supervise(child: int, alive: int) -> None:
    status = None
    while status is None and not select.select([alive], [], [], LOOK_SECONDS)[0]:
        status = _reaped(child)
    for _ in range(ENDING_LOOKS):  # the other process may close the pipe because the child ended
        if status is None:
            time.sleep(0.02)
            status = _reaped(child)
    for _ in range(KILLS):
        left = _descendants()
        if not left:
            break
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
        _reaped(child)
    if status is not None and os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)


def _reaped(child: int) -> int | None:
    """Reaps the children that have ended, including adopted children. Returns the status of `child`, or None
    if it was not among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            ended, how = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            if ended == child:
                status = how
    return status


def _descendants() -> list[int]:
    """Returns the descendants of this process."""
    parents = dict[int, int]()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = list[int]()
    level = [os.getpid()]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found
