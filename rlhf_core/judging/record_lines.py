"""Reads and writes files with one record per line, which survive a kill in the middle of a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import ValidationError

from rlhf_core.records import Frozen

Record = TypeVar("Record", bound=Frozen)


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """Opens a file of lines for appending. Terminates the last line if a kill truncated it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        if file.tell() and not _ends_with_a_line(path):
            file.write("\n")
        yield file


def records_of(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Yields the records in the complete lines of a file, skipping lines truncated by a kill. (`splitlines`
    would also split at U+2028.)"""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            record = kind.model_validate_json(line)
        except ValidationError:
            continue
        yield record


def _ends_with_a_line(path: Path) -> bool:
    """Returns whether a non-empty file ends with a line end."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
