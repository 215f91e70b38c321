"""A last resort beside the reaper: when a run is killed with -9, whatever it had started ends too.

The run marks its environment, which all of its processes inherit; a watcher, outside of the run's session, waits until the run is
gone and then ends every process that carries the mark: Prefect's temporary server, and stages whose reaper was killed as well.
Linux only (/proc); elsewhere nothing is started. Standard library only.
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
from pathlib import Path

MARK = "ALIGNFLOW_RUN"
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0  # more than the reaper's own grace, so that it can do its work first
GIVE_UP_SECONDS = 60.0


def start() -> None:
    """Marks this process's environment and starts its watcher. What is started from here on is ended when this process has gone."""
    if sys.platform != "linux":
        return
    unmarked = {key: value for key, value in os.environ.items() if key != MARK}
    os.environ[MARK] = uuid.uuid4().hex
    subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid()), os.environ[MARK]],  # by file: it needs nothing of ours
        env=unmarked,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def end_with_parent() -> None:
    """Has the system send SIGTERM to this process when the one that started it is gone (a worker killed with -9)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def marked(mark: str) -> list[int]:
    """Living processes of this user that were started with the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    start, asked = time.monotonic(), set[int]()
    while (alive := marked(mark)) and time.monotonic() - start < GIVE_UP_SECONDS:
        for pid in alive:
            late = time.monotonic() - start > GRACE_SECONDS
            if late or pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
