"""Ends the processes of a run that was killed with SIGKILL, even if the reaper was killed too.

The run puts a mark in its environment, which all of its processes inherit. A watcher in another session waits
until the run has ended, and then ends every process with the mark: Prefect's temporary server, and stages
whose reaper was also killed. Linux only; elsewhere no watcher is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil

MARK = "ALIGNFLOW_RUN"
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0  # longer than the reaper's grace period, so that the reaper ends its processes first
GIVE_UP_SECONDS = 60.0

_watched = 0  # id of the process that has a watcher; a fork of it has none


def start() -> None:
    """Marks this process's environment and starts a watcher, which ends all processes started from now on
    when this process has ended. Does nothing if this process already has a watcher."""
    global _watched
    if sys.platform != "linux" or _watched == os.getpid():
        return
    _watched = os.getpid()
    unmarked = {key: value for key, value in os.environ.items() if key != MARK}
    os.environ[MARK] = uuid.uuid4().hex
    subprocess.Popen(
        # run by path, so that none of our packages is imported
        [sys.executable, "-P", __file__, str(os.getpid()), os.environ[MARK]],
        env=unmarked,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send the signal `number` to this process when the thread that started it ends, even by
    SIGKILL. Does nothing outside Linux."""
    prctl(PR_SET_PDEATHSIG, number)


def prctl(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def marked(mark: str) -> list[int]:
    """Returns the pids of this user's processes that have the mark in their environment."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(MARK) == mark
    ]


def main(parent: int, mark: str) -> None:
    """Waits until process `parent` ends, then ends marked processes with TERM, and with KILL after
    GRACE_SECONDS, for at most GIVE_UP_SECONDS."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    start = time.monotonic()
    signalled = set[int]()
    while (alive := marked(mark)) and time.monotonic() - start < GIVE_UP_SECONDS:
        for pid in alive:
            late = time.monotonic() - start > GRACE_SECONDS
            if late or pid not in signalled:
                signalled.add(pid)
                send(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, unless it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
