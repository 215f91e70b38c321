"""Runs checks in a forked process with limits on time and memory. A check that exceeds a limit, or crashes,
is false, and the next check runs in a fresh process. Standard library only."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable
from typing import NoReturn

MEMORY_MIB = 1024  # on top of the memory the process had when it was forked
WAITING = 10  # a check may take this many times its CPU limit in wall-clock time, on a busy machine
START_SECONDS = 30.0
READY, RIGHT, WRONG = b"r", b"1", b"0"


def forked(check: Callable[[int], bool], count: int, seconds: float) -> list[bool]:
    """Returns `check(i)` for each i below `count`. `seconds`: limit on the CPU time of one check. Raises
    OSError when no process can be started."""
    found: list[bool] = []
    while len(found) < count:
        found += _until_one_fails(check, len(found), count, seconds)
    return found


def _until_one_fails(check: Callable[[int], bool], first: int, count: int, seconds: float) -> list[bool]:
    """Returns one process's results from check `first` on; the last is false if that check exceeded a limit
    or crashed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(check, range(first, count), writer, seconds)
    os.close(writer)
    found: list[bool] = []
    try:
        if _next(reader, START_SECONDS) != READY:
            raise OSError("the process for comparisons did not start")
        while first + len(found) < count:
            result = _next(reader, WAITING * seconds)
            found.append(result == RIGHT)
            if not result:
                break
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def _next(reader: int, seconds: float) -> bytes:
    """Returns the next byte; b"" if the process has ended or sent no byte in time."""
    ready, _, _ = select.select([reader], [], [], seconds)
    return os.read(reader, 1) if ready else b""


def _work(check: Callable[[int], bool], places: range, writer: int, seconds: float) -> NoReturn:
    """Writes one byte per check and ends the process, even if a check raises an error."""
    try:
        _limit_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        os.write(writer, READY)
        for place in places:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, even within one operation
            try:
                right = check(place)
            except Exception:  # any error for odd input, even MemoryError and RecursionError
                right = False
            os.write(writer, RIGHT if right else WRONG)
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm") as sizes:
        pages = int(sizes.read().split()[0])
    memory = pages * resource.getpagesize() + (MEMORY_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
