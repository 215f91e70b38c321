"""Runs a user's Python reward function in separate processes (see `function_worker.py`), which read and write
one line of JSON per request.

A function that hangs is stopped after the time limit. A crash does not stop the stage. Printed output is not
mistaken for a reward. A stopped process is restarted by the next request. `Client._batch` in clients.py
splits a batch to find the answer that hangs.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from types import MappingProxyType
from typing import Any

from rlhf_core.rewards.reward_contract import (
    LISTS,
    CodeError,
    Reply,
    RewardError,
    Sample,
    question_json,
    read_reply,
)
from rlhf_core.system.processes import child_environment, how_ended, kill_group

ENDING_SECONDS = 5.0  # how long a process may take to end once it has closed its output


def wanted_by(file: Path, name: str) -> Collection[str]:
    """Returns the lists of the contract that a function's signature names, without running its file; all of
    them if this cannot be determined."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):  # the worker reports the reason
        return LISTS
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    bound = [node for node in ast.walk(tree) if name in _bound(node)]
    if len(found) != 1 or len(bound) != 1 or found[0].decorator_list or found[0].args.kwarg:
        return LISTS
    arguments = found[0].args
    return LISTS & {
        argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    }


def _bound(node: ast.AST) -> list[str]:
    """Returns the names bound by a syntax node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


class Function:
    """Calls `name` from `file` in up to `processes` processes. `timeout`: seconds per request, and for the
    imports when a process starts. `options`: additional arguments, the same in every call, for which the
    function has defaults."""

    def __init__(
        self,
        file: Path,
        name: str,
        timeout: float,
        processes: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.timeout = timeout
        self._options = json.dumps(dict(options))
        self.wanted = wanted_by(file, name)
        worker = "rlhf_core.rewards.functions.function_worker"
        self._command = [sys.executable, "-P", "-m", worker, str(file), name]
        self._idle: queue.Queue[subprocess.Popen[bytes] | None] = queue.Queue()
        self._lock = Lock()
        self._closed = False
        self._running = set[subprocess.Popen[bytes]]()
        self._numbers = itertools.count()
        for _ in range(processes):
            self._idle.put(None)

    def score(self, samples: Sequence[Sample]) -> Reply:
        """Returns the function's rewards. Raises RewardError when the call fails, CodeError for a bug in the
        function's code, and ValueError when the function cannot be loaded."""
        process = self._idle.get()
        try:
            if process is None:
                process = self._start()
            reply = self._ask(process, samples)
        except BaseException:
            if process is not None:
                self._end(process)
            process = None
            raise
        finally:
            self._idle.put(process)
        if reply.get("place"):
            raise CodeError(reply["text"], reply["place"], reply["certain"])
        if "text" in reply:
            raise RewardError(reply["text"])
        return read_reply(json.dumps(reply), len(samples))

    def _ask(self, process: subprocess.Popen[bytes], samples: Sequence[Sample]) -> dict[str, Any]:
        """Sends a request and returns its reply. Raises RewardError for a line that is not a reply to this
        request."""
        number = next(self._numbers)
        question = question_json(samples, self.wanted)
        line = f'{{"number": {number}, "question": {question}, "options": {self._options}}}'
        reply = self._exchange(process, line.encode())
        if reply.get("number") != number:
            raise RewardError("its process wrote a line that is not the reply to this request")
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        # -P keeps the worker's own path safe. Scripts started by the function find the modules beside them as
        # usual.
        environment = {name: value for name, value in child_environment().items() if name != "PYTHONSAFEPATH"}
        with self._lock:
            if self._closed:
                raise RewardError("it gets no more requests")
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            ready = self._exchange(process, b"")
        except BaseException:
            self._end(process)
            raise
        if "ready" not in ready:
            self._end(process)
            raise ValueError(ready.get("text", "its process wrote a line that is not a reply"))
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
        """Writes a line (if any) and reads a line, which contains a JSON object. Kills the process when this
        exceeds the time limit."""
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(self.timeout, kill_group, [process.pid])
        timer.start()
        try:
            if line:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if not reply.endswith(b"\n"):
            raise RewardError(f"no answer within {self.timeout:g} s" if late else self._ending(process))
        try:
            found = json.loads(reply)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RewardError("its process wrote a line that is not a reply")
        return found

    def _ending(self, process: subprocess.Popen[bytes]) -> str:
        """Ends a process that has stopped writing, and returns a description of how it ended."""
        if self._closed:
            return "it gets no more requests"
        deadline = time.monotonic() + ENDING_SECONDS
        # WNOWAIT: `close` may kill the process until `_end` removes it from the running ones, so its ID must
        # not be reused before then.
        while not (by_itself := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        self._end(process)
        return (
            f"its process {how_ended(process.returncode)}" if by_itself else "its process closed its output"
        )

    def close(self) -> None:
        """Ends all processes. Callers waiting for one of them get an error."""
        with self._lock:
            self._closed = True
            for running in self._running:
                kill_group(running.pid)
        for _ in range(self._idle.qsize()):
            try:
                process = self._idle.get_nowait()
            except queue.Empty:
                return
            if process is not None:
                self._end(process)
            self._idle.put(None)  # for a thread that is about to send a request

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if process in self._running:
                kill_group(process.pid)
                process.wait()
                self._running.discard(process)  # before its ID can be reused
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unwritten data for a process that has ended
                    pipe.close()
