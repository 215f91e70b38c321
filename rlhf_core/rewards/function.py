"""Runs a user's Python reward function in separate processes (`function_worker.py`): one JSON line in, one JSON line out.

A function that hangs is stopped after the time limit. One that crashes does not stop the stage. What it prints is not read as a reward.
The next request starts a stopped process again. `Client._batch` in clients.py splits a batch to find the answer that hangs.
"""

from __future__ import annotations

import ast
import json
import queue
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer

from rlhf_core.rewards.contract import LISTS, Reply, RewardError, Sample, question_json, read_reply
from rlhf_core.system.processes import child_environment, kill_group


def wanted_by(file: Path, name: str) -> Collection[str]:
    """Returns the lists of the contract that the signature of a function names, without running its file; all where that does not tell."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):  # the worker will say what is wrong
        return LISTS
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    bound = [node for node in ast.walk(tree) if name in _bound(node)]
    if len(found) != 1 or len(bound) != 1 or found[0].decorator_list or found[0].args.kwarg:
        return LISTS
    arguments = found[0].args
    return LISTS & {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _bound(node: ast.AST) -> list[str]:
    """Returns the names that a node of a file binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


class Function:
    """Calls `name` of `file` in up to `processes` processes. `timeout` seconds a request; the first also waits for the imports."""

    def __init__(self, file: Path, name: str, timeout: float, processes: int):
        self.timeout, self.wanted = timeout, wanted_by(file, name)
        self._command = [sys.executable, "-P", "-m", "rlhf_core.rewards.function_worker", str(file), name]
        self._idle: queue.Queue[subprocess.Popen[bytes] | None] = queue.Queue()
        self._lock, self._closed, self._running = Lock(), False, set[subprocess.Popen[bytes]]()
        for _ in range(processes):
            self._idle.put(None)

    def score(self, samples: Sequence[Sample]) -> Reply:
        """Returns the function's rewards. RewardError when the call did; ValueError when the function cannot be loaded."""
        process = self._idle.get()
        try:
            if process is None:
                process = self._start()
            reply = json.loads(self._exchange(process, question_json(samples, self.wanted).encode()))
        except BaseException:
            if process is not None:
                self._end(process)
            process = None
            raise
        finally:
            self._idle.put(process)
        if "error" in reply:
            raise RewardError(reply["error"])
        return read_reply(json.dumps(reply), len(samples))

    def _start(self) -> subprocess.Popen[bytes]:
        # The worker's own path is safe by -P. Scripts that the function starts find the modules beside them, as anywhere.
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
            ready = json.loads(self._exchange(process, b""))
        except BaseException:
            self._end(process)
            raise
        if "error" in ready:
            self._end(process)
            raise ValueError(ready["error"])
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """Writes a line (if any) and reads one; the process is ended when that takes longer than the limit."""
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
            raise RewardError(f"no answer within {self.timeout:g} s" if late else "its process died")
        return reply

    def close(self) -> None:
        """Ends all processes; a caller that waits for one of them gets an error."""
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
            kill_group(process.pid)
            process.wait()
            self._running.discard(process)  # before another process may get its number
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unwritten data for a process that is gone
                    pipe.close()
