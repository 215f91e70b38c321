"""Starts the process of the next stage while the one before works: it imports the libraries of its kind, and
waits for a run directory.

The process is the one that a stage has anyway, with the same environment, below its own reaper: `python -m
PACKAGE --wait KIND DESCRIPTOR`. It is used only where all of that is as it would be for a process started
now. Until it reads a run directory it has touched nothing, so it can be ended without harm, and it ends with
the process that started it. Left out: stages that run side by side, whose environments differ, and machines
with GPUs, where a process that waits might hold memory of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_core.runs.allotment import variables
from rlhf_core.system.machine import free_memory, num_gpus
from rlhf_core.system.processes import child_environment

WAIT = "--wait"  # argument of a process that reads its run directory from a pipe
MEMORY = 3 << 30  # bytes that must be free: a process that waits holds half a GiB, beside a stage that works
GRACE_SECONDS = 10.0  # between TERM and KILL


class StageProcess(NamedTuple):
    """A process below its reaper, and what decided how it was started."""

    reaper: subprocess.Popen[bytes]
    module: str
    kind: str
    environment: Mapping[str, str]
    folder: str
    grace_seconds: float

    def fits(self, module: str, kind: str, grace_seconds: float) -> bool:
        """Returns whether it runs, and a process that is started now would be as it is."""
        wanted = (module, kind, environment_of_stage(), os.getcwd(), grace_seconds)
        return self.reaper.poll() is None and self[1:] == wanted


class Prepared:
    """Holds the process that waits for the next stage, at most one. Methods may be called from any thread.

    `plan` says which kind of stage comes after the one that is about to start; `launch` takes the process
    that waits, if there is one, and then starts the planned one (`start`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: tuple[str, str] | None = None
        self._waiting: StageProcess | None = None
        self._end_of_pipe = -1

    def plan(self, module: str, kind: str) -> None:
        """Sets the module and the kind of the stage after the one that is about to start."""
        self._planned = module, kind

    def start(self) -> None:
        """Starts the process of the planned stage, in place of one that waits; does nothing where it would
        not pay."""
        planned = self._planned
        self._planned = None
        if planned is None or sys.platform != "linux" or num_gpus() or free_memory() < MEMORY:
            return
        self.end()
        module, kind = planned
        reads, writes = os.pipe()
        try:
            process = reaped(module, [WAIT, kind, str(reads)], kind, GRACE_SECONDS, pass_fds=(reads,))
        except OSError:
            os.close(writes)
            return
        finally:
            os.close(reads)
        with self._lock:
            self._waiting = process
            self._end_of_pipe = writes

    def take(
        self, module: str, kind: str, run_dir: Path, grace_seconds: float
    ) -> subprocess.Popen[bytes] | None:
        """Tells the process that waits its run directory, and returns its reaper. Returns None, and ends the
        process, where a process started now would be another one; also where there is none."""
        with self._lock:
            found = self._waiting
            self._waiting = None
            pipe = self._end_of_pipe
            self._end_of_pipe = -1
        if found is None:
            return None
        try:
            with os.fdopen(pipe, "wb") as told:
                if found.fits(module, kind, grace_seconds):
                    told.write(os.fsencode(run_dir) + b"\n")
                    told.flush()
                    return found.reaper
        except OSError:  # the process has ended
            pass
        end(found.reaper, found.grace_seconds)
        return None

    def end(self) -> None:
        """Ends the process that waits, if there is one, and forgets the plan."""
        self._planned = None
        with self._lock:
            found = self._waiting
            self._waiting = None
            pipe = self._end_of_pipe
            self._end_of_pipe = -1
        if found is not None:
            os.close(pipe)
            end(found.reaper, found.grace_seconds)


def reaped(
    module: str, arguments: list[str], kind: str, grace_seconds: float, pass_fds: tuple[int, ...] = ()
) -> StageProcess:
    """Starts `python -m MODULE ARGUMENTS` below a reaper (rlhf_core/system/reaper.py), in a session of its
    own."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = environment_of_stage()
    reaper = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "rlhf_core.system.reaper",
            str(os.getpid()),
            str(grace_seconds),
            *command,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    return StageProcess(reaper, module, kind, environment, os.getcwd(), grace_seconds)


def environment_of_stage() -> dict[str, str]:
    """Returns the environment of a stage's process that this thread starts now."""
    return {**child_environment(), **variables()}


def end(reaper: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Stops a reaper, which stops all its descendants. Ignores further Ctrl-C while waiting."""
    while reaper.poll() is None:
        reaper.terminate()
        try:
            reaper.wait(timeout=grace_seconds + 5)
        except subprocess.TimeoutExpired:
            reaper.kill()
        except KeyboardInterrupt:
            continue
    if reaper.stdout is not None:
        reaper.stdout.close()


def awaited(descriptor: int) -> str | None:
    """Returns the run directory that the process at the other end of a pipe names; None when that has closed
    it without a word."""
    with suppress(OSError), os.fdopen(descriptor, "rb") as told:
        line = told.readline()
        return os.fsdecode(line[:-1]) if line.endswith(b"\n") else None
    return None


prepared = Prepared()  # of this process
