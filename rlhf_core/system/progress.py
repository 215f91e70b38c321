"""The progress of this process, counted where work gets done, so that a waiting process can distinguish slow work from none. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_steps = 0
_written: list[Path] = []


def made() -> None:
    """A part of the work is done: a pass over a micro-batch, a step of an engine, a group of weights."""
    global _steps
    _steps += 1


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
    return f"{_steps}/{sum(_size(file) for folder in list(_written) for file in folder.rglob('*'))}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # renamed or removed meanwhile
        return 0
