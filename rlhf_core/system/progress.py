"""Counts this process's units of work, so that a waiting process can distinguish slow work from no work.
Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# variable that names the file to which child processes append a byte for each part of their work
CHILDREN = "ALIGNFLOW_PROGRESS"

_steps = 0
_folders: list[Path] = []


def made() -> None:
    """Records that a unit of work is done, such as a pass over a micro-batch, an engine step or a group of
    weights."""
    global _steps
    place = os.environ.get(CHILDREN)
    if place:
        with suppress(OSError), open(place, "ab") as file:
            file.write(b".")
            return
    _steps += 1


def count_children() -> None:
    """Makes the progress of child processes count as this process's. The file that they write to is in memory
    and vanishes with this process."""
    os.environ[CHILDREN] = f"/proc/{os.getpid()}/fd/{os.memfd_create('progress')}"


@contextmanager
def files(folder: Path) -> Iterator[None]:
    """Counts as progress, within the block, the bytes that appear in the folder's files or that this process
    reads from them."""
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)


def seen() -> str:
    """Returns a string that changes whenever progress is made."""
    folders = list(_folders)
    written = [file for folder in folders for file in folder.rglob("*")]
    opened = Path("/proc/self/fd").glob("*") if folders else []
    read = sum(
        _position(file.name)
        for file in opened
        if any(file.resolve().is_relative_to(folder.resolve()) for folder in folders)
    )
    parts = _steps + _size(Path(os.environ.get(CHILDREN, os.devnull)))
    return f"{parts}/{sum(map(_size, written))}/{read}"


def between(pairs: Iterable[tuple[str, str]]) -> str:
    """Describes the work done between the two `seen` strings of each process: units of work (counted by
    `made`) and bytes written. An empty string in a pair means that there was no report."""
    counted = [
        tuple([int(count) for count in (text or "0/0").split("/")[:2]] for text in pair) for pair in pairs
    ]
    parts, written = (sum(max(0, after[i] - before[i]) for before, after in counted) for i in range(2))
    return f"{parts} parts of work" + (f", {written / 2**20:,.0f} MiB written" if written >= 2**20 else "")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # renamed or removed meanwhile
        return 0


def _position(descriptor: str) -> int:
    """Returns the current position in an open file, in bytes."""
    try:
        return int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[1])
    except OSError:  # closed meanwhile
        return 0
