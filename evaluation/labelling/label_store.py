"""Appends labels to a JSONL file that survives a kill at any byte: an acknowledged label is on disk
completely and exactly once.

Only one process writes, enforced by a file lock. A line is written and synced before `append` returns. A line
truncated by a kill has no line end, was not acknowledged, and is removed at the next start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from evaluation.labelling.label_records import HumanLabel
from rlhf_core.system.files import locked
from rlhf_core.system.machine import MachineLacks

START = b'{"uid":'  # start of each line


def read_labels(path: Path) -> list[HumanLabel]:
    """Returns all lines of a labels file, including lines with `undone`, except a truncated last line.

    Raises ValueError for a missing file and for a line that is not a label.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: this file does not exist: give the labels that `alignflow label SOURCE --out FILE`"
            " wrote"
        )
    return _parsed(path, path.read_bytes())


class LabelFile:
    """An open labels file. `labels`: its lines, including lines with `undone`."""

    def __init__(self, path: Path):
        """Opens the file, or creates it with mode 0600. Raises ValueError, and leaves the file unchanged,
        when it is not a labels file."""
        self._path = path
        there = path.read_bytes() if path.exists() else b""
        self.labels = _parsed(path, there)
        self._size = there.rfind(b"\n") + 1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):  # some file systems do not support fsync of a folder
            os.fsync(folder)
        os.close(folder)

    def append(self, label: HumanLabel) -> None:
        """Writes a label to disk. If that fails, raises OSError and leaves the file unchanged."""
        if not os.path.exists(self._path) or not os.path.samestat(os.stat(self._path), os.fstat(self._file)):
            raise OSError(f"{self._path} was moved, removed or replaced: put it back, or start again")
        os.ftruncate(self._file, self._size)  # removes a partial line left by an earlier failure
        line = label.model_dump_json().encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self.labels.append(label)

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def opened(path: Path) -> Iterator[LabelFile]:
    """Opens a labels file for the block, during which no other process can open it. Raises MachineLacks when
    another process has it open, and ValueError when the folder does not exist or the file is not a labels
    file."""
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{path}: the folder {path.absolute().parent} does not exist: create it, or give another --out"
        )
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file: give another --out")
    if path.exists():
        read_labels(path)  # fails before leaving a lock beside a file of another kind
    path = path.absolute()
    with locked(path.with_name(f".{path.name}.lock")) as ours:
        if not ours:
            raise MachineLacks(
                f"{path}: another `alignflow label` is writing to this file: use that one, stop it, or give"
                " another --out"
            )
        file = LabelFile(path)
        try:
            yield file
        finally:
            file.close()


def _parsed(path: Path, content: bytes) -> list[HumanLabel]:
    *lines, cut = content.split(b"\n")
    start = cut.rstrip(b"\0")  # after a power failure, the end of a file may be zeros
    if start and not START.startswith(start[: len(START)]):
        raise ValueError(
            f"{path}: the last line is not a label: give a file that `alignflow label` wrote, or a new one"
        )
    labels = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            labels.append(HumanLabel.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            what = ".".join(map(str, fault["loc"])) or "the line"
            raise ValueError(
                f"{path}, line {number}: is not a label ({what}: {fault['msg']}): give a file that `alignflow"
                " label` wrote, or a new one"
            ) from None
    return labels
