"""Manages the process that runs an environment of the package `verifiers` in its own interpreter: starts it,
requests episodes, and kills it when it stops responding. Each environment process has one such process; both
end together."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from rlhf_core.data.rows.verifiers_rows import driver_command, driver_environment
from rlhf_core.system.processes import how_ended

START_SECONDS = 110.0  # for loading the environment; shorter than the limit of an environment process
STOP_SECONDS = 20.0  # for a cancelled episode to end before the process counts as blocked
LONGEST_LINE = 2**26  # bytes
TOLD = 400  # characters of its error output shown in a message


class DriverEnded(RuntimeError):
    """Raised when the process ends while an episode is running."""


class DriverProcess:
    """The driver process. `asked`: the first line sent to it. The constructor waits until the environment is
    loaded; `attach` then hands the process to an event loop. Raises ValueError with a user-facing message
    when the environment cannot be used."""

    def __init__(self, python: str | None, asked: Mapping[str, Any]):
        self.ended = False
        self._blocked = False
        self._said = ""
        self._waiting = dict[int, asyncio.Future[dict[str, Any]]]()
        self._numbers = itertools.count()
        self._tasks = set[asyncio.Task[None]]()
        self._process, self._life = started(python)
        self._hearing = threading.Thread(target=self._keep_said, daemon=True)
        self._hearing.start()
        first = self._first_answer(json.dumps(asked).encode() + b"\n")
        if "ready" not in first:
            ending = f"the process of {asked['name']} {self._kill()}: {self._last_said()}"
            raise ValueError(f"verifiers: {first.get('problem') or ending}")

    def _first_answer(self, asked: bytes) -> dict[str, Any]:
        """Returns the process's first reply; a `problem` if no reply arrives within START_SECONDS, and an
        empty reply if the process ends first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        end = time.monotonic() + START_SECONDS
        line = bytearray()
        with suppress(OSError, ValueError):
            self._process.stdin.write(asked)
            while not line.endswith(b"\n"):
                left = end - time.monotonic()
                if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                    return {"problem": f"it is not loaded after {START_SECONDS:g} s"}
                byte = self._process.stdout.read(1)
                if not byte:
                    break
                line += byte
            return dict(json.loads(line))
        return {}

    def _keep_said(self) -> None:
        """Forwards the process's error output to stderr, and keeps the end of it for messages."""
        assert self._process.stderr is not None
        while part := self._process.stderr.read(65536):
            text = part.decode(errors="replace")
            sys.stderr.write(text)
            sys.stderr.flush()
            self._said = (self._said + text)[-TOLD:]

    def _last_said(self) -> str:
        self._hearing.join(1.0)
        return " ".join(self._said.split()) or "it wrote no error"

    def _kill(self) -> str:
        """Ends the process and everything it has started. Returns a description of how it ended."""
        self.ended = True
        if self._life >= 0:
            os.close(self._life)  # its supervisor kills the others and then ends
            self._life = -1
        try:
            return how_ended(self._process.wait(10.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "does not end"

    async def attach(self) -> None:
        """From now on, reads and writes the pipes in the running event loop."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._process.stdout)
        self._writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)
        self._begin(self._read(lines))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work that belongs to no episode."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, lines: asyncio.StreamReader) -> None:
        with suppress(ValueError):  # not JSON, or a line that never ends: something else writes to the pipe
            while line := await lines.readline():
                told = json.loads(line)
                waiting = self._waiting.get(told.get("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
        ending = await asyncio.to_thread(self._kill)
        self._writing.close()
        if self._blocked:
            ending = "was killed, since an episode blocked it"
        said = await asyncio.to_thread(self._last_said)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(DriverEnded(f"the process of the environment {ending}: {said}"))

    async def run(self, task: Any, model: str) -> dict[str, Any]:
        """Returns the process's report on an episode: its reward, or an error. Raises DriverEnded if the
        process ends first. Cancelling this call also cancels the episode in the process."""
        if self.ended:
            raise DriverEnded("the process of the environment has ended")
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(start=number, task=task, model=model)
        try:
            return await waiting
        finally:
            del self._waiting[number]
            if waiting.cancelled() and not self.ended:
                self._begin(self._stop(number))

    async def _stop(self, number: int) -> None:
        """Cancels an episode. Kills the process if it does not respond, because the episode's code is then
        blocking all the others."""
        ending = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(cancel=number)
        try:
            with suppress(DriverEnded):
                await asyncio.wait_for(ending, STOP_SECONDS)
        except TimeoutError:
            self._blocked = True
            await asyncio.to_thread(self._kill)
        finally:
            del self._waiting[number]

    def _send(self, **line: Any) -> None:
        self._writing.write(json.dumps(line).encode() + b"\n")


def started(python: str | None) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the driver in an interpreter. Returns its process and the descriptor that keeps it alive while
    open. Raises ValueError if it cannot be started."""
    alive, life = os.pipe()
    try:
        process = subprocess.Popen(
            driver_command(python, "serve", str(alive)),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=driver_environment(),
            pass_fds=(alive,),
            start_new_session=True,  # it outlives this process in order to kill everything it has started
        )
    except OSError as error:
        os.close(life)
        raise ValueError(
            f"verifiers: the interpreter {python} cannot be started ({error.strerror}): correct python"
        ) from error
    finally:
        os.close(alive)
    return process, life
