"""The town's processes: rounds of the loop, `alignflow` commands, and servers. All of them are the real ones,
each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.programs import captured, logged

ROOT = Path(__file__).parents[2]
ROUND_SECONDS = 900.0
COMMAND_SECONDS = 120.0
LEFT_SECONDS = 60.0
CALL = """
import sys
from flows.loops import loop
state = loop(sys.argv[1], return_state=True)
print("STATE", state.type.value, state.message, flush=True)
"""


class Ended(NamedTuple):
    """How a process ended. `state`: type and message of a flow run; '' when the process was killed."""

    code: int
    state: str
    output: str
    seconds: float


class Here(NamedTuple):
    """A folder with a recipe, and the environment of its processes."""

    folder: Path
    environment: dict[str, str]

    def loop(self, log: Path, kill_when: Callable[[], bool] | None = None) -> Ended:
        """Runs the flow `loop` once. `kill_when`: true when its process is to be killed with -9."""
        begin = time.monotonic()
        log.unlink(missing_ok=True)
        command = [sys.executable, "-c", CALL, "recipe.yaml"]
        process = logged(command, log, cwd=self.folder, env=self.environment)
        try:
            while process.poll() is None:
                if kill_when is not None and kill_when():
                    os.kill(process.pid, signal.SIGKILL)
                if time.monotonic() - begin > ROUND_SECONDS:
                    raise TimeoutError(f"a night did not end in {ROUND_SECONDS:g} s: see {log}")
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        self.wait_until_none_is_left(process.pid)
        text = log.read_text()
        state = text.partition("\nSTATE ")[2].strip()
        return Ended(process.returncode, state, text, time.monotonic() - begin)

    def alignflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return captured(command, cwd=self.folder, env=self.environment, timeout=COMMAND_SECONDS)

    def wait_until_none_is_left(self, flow: int) -> None:
        """Waits until no stage of the recipe works any more. Raises TimeoutError that names those that do."""
        deadline = time.monotonic() + LEFT_SECONDS
        while left := self._stages():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{LEFT_SECONDS:g} s after the end of process {flow} these still run: {left}"
                )
            time.sleep(0.2)

    def _stages(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if f"{self.folder}/artifacts/stages/" in command:
                found.append(f"{process.pid} {command[:200]}")
        return found


@contextmanager
def serving(here: Here, log: Path, *arguments: str) -> Iterator[None]:
    """Runs `alignflow` with arguments that make it serve until the block ends."""
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "flows.cli", *arguments]
    process = logged(command, log, cwd=here.folder, env=here.environment)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)
