"""Ends all processes of a stage when it or its launcher ends: `python -m rlhf_core.system.reaper PARENT_PID
GRACE_SECONDS COMMAND...`

Runs as the parent of COMMAND, in its own session. It adopts every descendant whose parent dies (daemons that
Ray detaches, for example). As soon as COMMAND ends, SIGTERM arrives, or PARENT_PID ends, even by SIGKILL, the
reaper ends all descendants with TERM, and with KILL after the grace period. Its exit code is COMMAND's (128 +
n for signal n). This needs Linux (PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER). Elsewhere the parent is polled
and COMMAND's process group is ended, but a daemon that leaves the group is not found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import psutil

from rlhf_core.system.orphan_watcher import end_with_parent, prctl, send

POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"


def main(parent: int, grace_seconds: float, command: Sequence[str]) -> int:
    """Runs `command`, ends its descendants, and returns its exit code, or 1 if process `parent` has already
    ended."""
    stop = False

    def on_term(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_term)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return 1  # the parent died before PR_SET_PDEATHSIG was set
    # The child inherits only the descriptors that this process was given to pass on (pass_fds), because no
    # others are inheritable.
    child = subprocess.Popen(
        command, start_new_session=True, preexec_fn=_as_child, stdin=subprocess.DEVNULL, close_fds=False
    )
    code: int | None = None
    while code is None and not stop and os.getppid() == parent:
        time.sleep(POLL_SECONDS)
        code = _reap(child.pid)
    ended = _end_all(child.pid, grace_seconds)
    code = ended if code is None else code
    if code is None:
        return 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def descendants(root: int) -> list[int]:
    """Returns the pids of all descendants of `root`, without zombies."""
    return [process.pid for process in psutil.Process(root).children(recursive=True) if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end_all(child: int, grace_seconds: float) -> int | None:
    """Sends TERM to all descendants, then KILL after the grace period, until none is left. Returns the
    child's exit code, or None if it had already ended."""
    code: int | None = None
    deadline = time.monotonic() + grace_seconds
    signalled: set[int] = set()
    while alive := _alive(child):
        late = time.monotonic() >= deadline
        for pid in alive:
            if late or pid not in signalled:
                signalled.add(pid)
                send(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)
        code = _first(code, _reap(child))
    return _first(code, _reap(child))


def _first(code: int | None, later: int | None) -> int | None:
    return later if code is None else code


def _alive(child: int) -> list[int]:
    if LINUX:
        return descendants(os.getpid())
    try:
        os.killpg(child, 0)
    except OSError:
        return []
    return [-child]


def _reap(child: int) -> int | None:
    """Collects every process that has ended, and returns the exit code of `child` (-n for signal n) if it is
    among them, else None."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _as_child() -> None:
    """Runs in the child before exec. Restores default signal handling and makes the kernel kill the child
    when the reaper dies."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
