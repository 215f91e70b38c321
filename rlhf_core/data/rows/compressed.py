"""Opens data files as text. Decompresses files (`.gz`, `.zst`) while they are read. Torch-free.

A small compressed file can decompress to any size. Its rows, and lists that are read whole, therefore have a
maximum size. Archives of several files are not supported.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rlhf_core.system.machine import MachineLacks

COMPRESSED = (".gz", ".zst")
LARGEST_ROW = 16 << 20  # most characters of a row in a compressed file
LARGEST_LIST = 1 << 30  # most characters of a compressed .json file with one list


def data_suffix(path: str | Path) -> str:
    """Returns the suffix that describes a file's content: `.jsonl` for both rows.jsonl and rows.jsonl.gz.
    Returns "" if there is none."""
    place = Path(path)
    return Path(place.stem).suffix if place.suffix in COMPRESSED else place.suffix


def open_binary(path: str) -> IO[bytes] | gzip.GzipFile:
    """Opens a file for reading. A compressed file is decompressed while it is read. Raises OSError for the
    same reasons as `open`, and MachineLacks for a .zst file if pyarrow is not installed."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".zst":
        try:
            import pyarrow
        except ImportError:
            raise MachineLacks(
                f"{path}: needs the package pyarrow to be unpacked: install it, or compress the file with"
                " gzip"
            ) from None
        return pyarrow.input_stream(path, compression="zstd")
    return open(path, "rb")


@contextmanager
def opened_rows(path: str, newline: str | None = None) -> Iterator[RowLines]:
    """Yields a text file's lines, without a byte order mark. Raises ValueError for a file that cannot be
    decompressed, OSError for the same reasons as `open`, and UnicodeDecodeError for a file that is not
    UTF-8."""
    packed = Path(path).suffix in COMPRESSED
    with open_binary(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
        try:
            yield RowLines(path, text, LARGEST_ROW if packed else None)
        except (EOFError, OSError, zlib.error) as error:
            if not packed:
                raise
            reason = str(error).split("\n")[0].rstrip(". ")
            raise ValueError(f"{path}: cannot be unpacked ({reason}): compress the file again") from error


class RowLines:
    """Iterates over the lines of a text file. Raises ValueError if more than `largest` characters are read
    without a call of `end_row`; None means no limit."""

    def __init__(self, path: str, text: io.TextIOWrapper, largest: int | None):
        self._path = path
        self._text = text
        self._largest = largest
        self._of_row = 0
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._number += 1
        if self._largest is None:
            line = self._text.readline()
        else:
            line = self._text.readline(self._largest - self._of_row + 1)
            self._of_row += len(line)
            if self._of_row > self._largest:
                size = f"{self._largest >> 20} Mi"
                raise ValueError(
                    f"{self._path}, line {self._number}: a row has more than {size} characters when it is"
                    " unpacked: drop the row, or give the file as it is, not compressed"
                )
        if not line:
            raise StopIteration
        return line

    def end_row(self) -> None:
        """Restarts the character count for the next row."""
        self._of_row = 0

    def whole(self) -> str:
        """Returns the rest of the file. Raises ValueError if a compressed file has more than LARGEST_LIST
        characters."""
        if self._largest is None:
            return self._text.read()
        text = self._text.read(LARGEST_LIST + 1)
        if len(text) > LARGEST_LIST:
            raise ValueError(
                f"{self._path}: holds a list of more than {LARGEST_LIST >> 20} Mi characters when it is"
                " unpacked, and a list is read whole: convert it to .jsonl with a row in each line"
            )
        return text

    def first_character(self) -> str:
        """Reads up to and including the first non-whitespace character and returns that character, or "" if
        there is none."""
        character = self._text.read(1)
        while character.isspace():
            character = self._text.read(1)
        return character
