"""Says whether a local data file may have images, without reading its rows. Torch-free."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from rlhf_core.data.pictures.message_parts import COLUMNS, IMAGE_KINDS
from rlhf_core.data.rows.compressed import data_suffix, open_binary

# names of columns, and types of parts
NAMES = tuple(dict.fromkeys([*COLUMNS, *IMAGE_KINDS]))
FIELD = re.compile(f'"({"|".join(NAMES)})"'.encode())
BLOCK = 1 << 20  # bytes
LONGEST = 32  # bytes of a match, at most


def may_hold_images(path: str, limit: int | None = None) -> bool:
    """Returns whether a file may have rows with images: False if no column and no part of a message has the
    name of an image. `limit`: bytes to look at; what is beyond is taken for more of the same. True for
    everything else than a readable local file."""
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
        return True  # the check before the run names the fault


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
    # parts of messages are structs, whose types are in the rows
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
