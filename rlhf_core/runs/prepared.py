"""Starts a stage's process early, while the previous stage runs or the run itself starts. The process imports
the libraries that its kind needs and waits for a run directory.

The process is the stage's usual one, with the same environment and its own reaper: `python -m PACKAGE --wait
KIND DESCRIPTOR`. It is used only if it equals the process that would be started now. It changes nothing
before it reads a run directory, so killing it is harmless, and it ends with the process that started it. No
process is prepared for stages that run at the same time, because their environments differ. No process is
prepared on machines with GPUs either, because a waiting process might hold GPU memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_core.runs.allotment import variables
from rlhf_core.runs.run_dir import HOLDER_ENV
from rlhf_core.system.machine import free_memory, num_gpus
from rlhf_core.system.processes import child_environment

WAIT = "--wait"  # argument of a process that reads its run directory from a pipe
MEMORY = 3 << 30  # bytes that must be free: a waiting process holds half a GiB beside the running stage
GRACE_SECONDS = 10.0  # between TERM and KILL
# Variables that a run sets after it has started its first stage's process. No library reads them on import,
# so the process receives them with its run directory.
SET_LATER = ("PREFECT_API_URL", "PREFECT_UI_URL", HOLDER_ENV)


class StageProcess(NamedTuple):
    """A process under its reaper, and the parameters with which it was started."""

    reaper: subprocess.Popen[bytes]
    module: str
    kind: str
    environment: Mapping[str, str]
    folder: str
    grace_seconds: float

    def fits(self, module: str, kind: str, grace_seconds: float) -> bool:
        """Returns whether the process is running and equals the process that would be started now."""
        if self.reaper.poll() is not None or _fixed(self.environment) != _fixed(environment_of_stage()):
            return False
        wanted = (module, kind, os.getcwd(), grace_seconds)
        return (self.module, self.kind, self.folder, self.grace_seconds) == wanted


class Prepared:
    """Holds at most one process that waits for the next stage. Methods may be called from any thread.

    `plan` sets the kind of the stage after the one about to start. `launch` takes the waiting process, if
    there is one, and then starts the planned one (`start`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: tuple[str, str] | None = None
        self._waiting: StageProcess | None = None
        self._end_of_pipe = -1

    def plan(self, module: str, kind: str) -> None:
        """Sets the module and the kind of the stage after the one about to start."""
        self._planned = module, kind

    def start(self) -> None:
        """Starts the planned stage's process unless an equal one is already waiting; replaces a different
        one. Does nothing outside Linux, with GPUs, or with little free memory."""
        planned = self._planned
        self._planned = None
        if planned is None or sys.platform != "linux" or num_gpus() or free_memory() < MEMORY:
            return
        module, kind = planned
        with self._lock:
            if self._waiting is not None and self._waiting.fits(module, kind, GRACE_SECONDS):
                return
        self.end()
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
        """Sends the run directory to the waiting process and returns its reaper. Returns None if no process
        waits. Also returns None, and ends the waiting process, if it differs from one that would be started
        now."""
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
                    environment = environment_of_stage()
                    later = {name: environment[name] for name in SET_LATER if name in environment}
                    told.write(json.dumps({"run_dir": str(run_dir), "environment": later}).encode() + b"\n")
                    told.flush()
                    return found.reaper
        except OSError:  # the process has ended
            pass
        end(found.reaper, found.grace_seconds)
        return None

    def end(self) -> None:
        """Ends the waiting process, if there is one, and clears the plan."""
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
    """Starts `python -m MODULE ARGUMENTS` under a reaper (rlhf_core/system/reaper.py), in its own session.
    Returns the process."""
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
    """Returns the environment for a stage's process that this thread starts."""
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
    """Returns the run directory sent through a pipe, after setting the environment variables sent with it;
    None when the other end closes the pipe without sending one."""
    line = b""
    with suppress(OSError), os.fdopen(descriptor, "rb") as told:
        line = told.readline()
    if not line.endswith(b"\n"):
        return None
    sent = json.loads(line)
    for name in SET_LATER:
        os.environ.pop(name, None)
    os.environ.update(sent["environment"])
    return str(sent["run_dir"])


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that must be the same from the start of a process."""
    return {name: value for name, value in environment.items() if name not in SET_LATER}


prepared = Prepared()  # of this process
