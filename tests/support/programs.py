"""Programs as processes of their own: run to their end, or started with their output in a file."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil


def captured(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Returns a finished program with its output as text; it gets no input. `options`: of `subprocess.run`,
    such as `cwd`, `env` and `timeout`."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)


def logged(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program that gets no input and appends its output to a file."""
    with log.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **options)


def hear_ctrl_c() -> None:
    """For `preexec_fn`: a shell has commands in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
