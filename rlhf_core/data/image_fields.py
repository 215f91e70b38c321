"""Determines whether a local data file may contain images, and which image files it names. Opens no images.
Torch-free."""

from __future__ import annotations

import contextlib
import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config import Source
from rlhf_core.data.pictures.message_parts import COLUMNS, GIVEN, IMAGE_KINDS, SCHEME
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource
from rlhf_core.data.rows.compressed import data_suffix, open_binary
from rlhf_core.data.rows.row_files import raw_rows

# Names of columns and types of message parts.
NAMES = tuple(dict.fromkeys([*COLUMNS, *IMAGE_KINDS]))
FIELD = re.compile(f'"({"|".join(NAMES)})"'.encode())
BLOCK = 1 << 20  # bytes
LONGEST = 32  # most bytes of a match


def may_hold_images(path: str, limit: int | None = None) -> bool:
    """Returns whether a file may have rows with images. Returns False if no column and no message part has an
    image name. `limit` is the number of bytes to search; the remaining rows are assumed to be similar.
    Returns True for anything that is not a readable local file."""
    file = Path(path)
    if not file.is_file():
        return True
    try:
        if file.suffix == ".parquet":
            return _in_schema(file)
        if data_suffix(path) == ".csv":
            return _in_header(path)
        return _in_text(path, limit)
    except (OSError, ValueError, EOFError):
        return True  # the check before the run reports the fault


def _in_schema(file: Path) -> bool:
    import pyarrow
    from pyarrow.parquet import read_schema

    names: set[str] = set()
    fields = list(read_schema(file))
    while fields:
        field = fields.pop()
        names.add(field.name)
        if pyarrow.types.is_nested(field.type):
            fields += [field.type.field(index) for index in range(field.type.num_fields)]
    # message parts are structs, whose types are in the rows
    return bool(names & {*NAMES, "type"})


def _in_header(path: str) -> bool:
    with open_binary(path) as lines:
        first = lines.readline().decode("utf-8-sig")
    return bool(set(COLUMNS) & set(next(csv.reader([first]), [])))


def _in_text(path: str, limit: int | None) -> bool:
    seen = 0
    before = b""
    with open_binary(path) as file:
        while (limit is None or seen < limit) and (block := file.read(BLOCK)):
            if FIELD.search(before + block):
                return True
            before = block[-LONGEST:]
            seen += len(block)
    return False


def image_names(path: Path) -> list[str]:
    """Returns the image paths in a data file's rows, as written, sorted. Ignores the rows after an unreadable
    row, because no stage reads such a file."""
    if not may_hold_images(str(path)):
        return []
    names: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        for row in _rows(path):
            names.update(_names_of(row))
    return sorted(names)


def image_files(path: str, names: Iterable[str]) -> dict[str, Path]:
    """Returns the files of the images that a data file names. Leaves out files outside its folder, which are
    never read."""
    found = {}
    for name in names:
        with contextlib.suppress(PictureFault):
            found[name] = Path(PictureSource(name, os.path.dirname(os.path.abspath(path))).file)
    return found


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix != ".parquet":
        yield from raw_rows(Source(path=str(path)), None)
        return
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _names_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the paths in a row's image columns and in the image parts of its messages."""
    for column in COLUMNS:
        value = row.get(column)
        for cell in value if isinstance(value, list | tuple) else [value]:
            if name := _name_of(cell):
                yield name
    values = [row]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            if value.get("type") in IMAGE_KINDS:
                cell = next((value[key] for key in GIVEN if value.get(key) is not None), None)
                if name := _name_of(value if "bytes" in value else cell):
                    yield name
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value


def _name_of(cell: Any) -> str:
    """Returns the path of an image, or "" for bytes, a URL, or anything that is not an image."""
    if isinstance(cell, Mapping):
        if cell.get("bytes") is not None:
            return ""
        return _name_of(next((cell[key] for key in ("url", "path") if cell.get(key) is not None), None))
    if not isinstance(cell, str) or cell.startswith("data:") or SCHEME.match(cell) or "\0" in cell:
        return ""
    return cell
