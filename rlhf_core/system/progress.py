"""The progress of this process, counted where work gets done, so that a waiting process can distinguish slow work from none. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHILDREN = "ALIGNFLOW_PROGRESS"  # names the file to which the children of a process append a byte for each part of their work

_steps = 0
_written: list[Path] = []


def made() -> None:
    """A part of the work is done: a pass over a micro-batch, a step of an engine, a group of weights."""
    global _steps
    _steps += 1
    if place := os.environ.get(CHILDREN):
        with suppress(OSError), open(place, "ab") as file:
            file.write(b".")


def count_children() -> None:
    """From now on the progress of child processes is progress of this one. The file is in memory, and ends with this process."""
    os.environ[CHILDREN] = f"/proc/{os.getpid()}/fd/{os.memfd_create('progress')}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While open, bytes that appear in the folder are progress too."""
    _written.append(folder)
    try:
        yield
    finally:
        _written.remove(folder)


def seen() -> str:
    """A text that is another one when there was progress."""
    files = [file for folder in list(_written) for file in folder.rglob("*")]
    return f"{_steps}/{sum(map(_size, [*files, Path(os.environ.get(CHILDREN, os.devnull))]))}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # renamed or removed meanwhile
        return 0
