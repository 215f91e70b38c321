"""The progress of this process, counted where work gets done, so that a waiting process can distinguish slow work from none. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHILDREN = "ALIGNFLOW_PROGRESS"  # names the file to which the children of a process append a byte for each part of their work

_steps = 0
_folders: list[Path] = []


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
def files(folder: Path) -> Iterator[None]:
    """While open, bytes that appear in files of the folder, or that this process reads from them, are progress too."""
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)


def seen() -> str:
    """A text that is another one when there was progress."""
    folders = list(_folders)
    written = [file for folder in folders for file in folder.rglob("*")]
    opened = Path("/proc/self/fd").glob("*") if folders else []
    read = sum(_position(file.name) for file in opened if any(file.resolve().is_relative_to(folder.resolve()) for folder in folders))
    return f"{_steps}/{sum(map(_size, [*written, Path(os.environ.get(CHILDREN, os.devnull))]))}/{read}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # renamed or removed meanwhile
        return 0


def _position(descriptor: str) -> int:
    """Bytes before the place at which an open file is read or written."""
    try:
        return int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[1])
    except OSError:  # closed meanwhile
        return 0
