"""Runs an agent that is a command, as one process per episode.

The process reads the task as JSON from its standard input. The variables OPENAI_BASE_URL and OPENAI_API_KEY,
which OpenAI's clients read, name the endpoint and its key. TMPDIR names a folder for temporary files, which
is removed after the episode.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.system.processes import how_ended

LONGEST_OUTPUT = 2**20  # bytes of the command's output that are kept, counted from the end
RUNNING = set[int]()  # process IDs of running commands, which asyncio reaps
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TOLD = 400  # bytes of the command's error output shown in a message


class AgentFailed(Exception):
    """Raised when the command ends with an error."""


async def run_command(command: str, task: Mapping[str, Any], base_url: str, key: str) -> str:
    """Runs the command and returns its standard output. Raises AgentFailed when it exits with a non-zero
    status. When the command ends, or this call is cancelled, everything it started is killed, including the
    command itself."""
    with tempfile.TemporaryDirectory(prefix="alignflow-agent-", ignore_cleanup_errors=True) as folder:
        # files rather than pipes, which a process left behind by the command would keep open
        given, out, error = (Path(folder) / name for name in ("task.json", "stdout", "stderr"))
        given.write_text(json.dumps(task, default=str))
        with given.open("rb") as stdin, out.open("wb") as stdout, error.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=agent_environment(folder, base_url, key),
            )
        RUNNING.add(process.pid)
        try:
            code = await process.wait()
        finally:
            kill_all_of(key, process)
            await process.wait()
            RUNNING.discard(process.pid)
        if code:
            said = tail(error, TOLD).strip()
            raise AgentFailed(f"the agent {how_ended(code)}: {said or 'it wrote no error'}")
        return tail(out, LONGEST_OUTPUT)


def tail(file: Path, size: int) -> str:
    """Returns the last `size` bytes of a file as text."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode(errors="replace")


def agent_environment(folder: str, base_url: str, key: str) -> dict[str, str]:
    """Returns the command's environment variables: this process's own, the endpoint, and a folder for
    temporary files."""
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "TMPDIR": folder}
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}


def adopt_orphans() -> None:
    """Makes this process adopt descendants whose parent has ended, so that they can be found. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all_of(key: str, process: asyncio.subprocess.Process) -> None:
    """Kills the command if it is still running, and all processes that its episode has started. These
    processes belong to this process's group, so they end at the latest when this process ends."""
    if process.returncode is None:
        with suppress(psutil.NoSuchProcess):
            kill_tree(psutil.Process(process.pid))
    kill_marked("OPENAI_API_KEY", key)


def kill_marked(variable: str, value: str) -> None:
    """Kills the children of this process, including adopted orphans, that have `variable` set to `value` in
    their environment, together with their descendants. Reaps orphans that have ended."""
    for child in psutil.Process().children():
        if child.pid in RUNNING:
            continue
        with suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            elif child.environ().get(variable) == value:
                kill_tree(child)
                os.waitpid(child.pid, 0)


def kill_tree(process: psutil.Process) -> None:
    """Kills a process and its descendants."""
    with suppress(psutil.NoSuchProcess):
        for found in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                found.kill()
