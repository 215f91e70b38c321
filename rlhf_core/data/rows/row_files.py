"""Reads the rows of files and Hub data sets, one at a time. Torch-free.

The standard library parses JSON and CSV files, because it keeps text unchanged. The readers of `datasets`
guess types, and convert answers that look like dates, numbers or "None". `datasets` reads parquet, which has
types, and Hub data sets (downloaded and read from disk). Only a .json file with one list is read whole. JSON
and CSV files may be compressed (see `compressed.py`).
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_core.config import Source
from rlhf_core.config.generated_data import GENERATED
from rlhf_core.data.rows.columns import Row
from rlhf_core.data.rows.compressed import COMPRESSED, RowLines, data_suffix, open_binary, opened_rows
from rlhf_core.data.rows.reasoning_gym_rows import reasoning_gym_rows
from rlhf_core.data.rows.verifiers_rows import verifiers_rows
from rlhf_core.hub.ids import parted

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")  # these files may be compressed
# JSON escapes characters beyond \uffff as two of these; a truncated text may end with the first.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def is_file(source: Source) -> bool:
    """Returns whether a source is a local file, judging by its name."""
    return is_text(source.path) or Path(source.path).suffix == ".parquet"


@lru_cache(maxsize=1024)  # called for each row
def is_text(path: str) -> bool:
    """Returns whether a file's suffix is JSON or CSV, compressed or not."""
    return data_suffix(path) in TEXT_SUFFIXES


def is_arrow(source: Source) -> bool:
    """Returns whether Arrow reads a source; it reads parquet and Hub data sets."""
    return not is_text(source.path) and not source.is_generated


def raw_rows(source: Source, first: int | None) -> Iterator[Row]:
    """Yields the first `first` rows (None: all) of a source unchanged, except that stored rows lose the
    column GENERATED, which a verifier unpickles. Raises ValueError for a file or Hub data set that cannot be
    read."""
    if source.reasoning_gym is not None:
        yield from reasoning_gym_rows(source.reasoning_gym, first)
        return
    if source.verifiers is not None:
        yield from verifiers_rows(source.verifiers, first)
        return
    for row in _stored_rows(source, first):
        row.pop(GENERATED, None)
        yield row


def _stored_rows(source: Source, first: int | None) -> Iterator[Row]:
    path = Path(source.path)
    if source.is_inbox:
        raise ValueError(
            f"{source.path}: there is no such inbox: `alignflow feedback import FILE --inbox {source.path}`"
            " makes it"
        )
    if path.is_dir():
        raise ValueError(f"{source.path}: is a directory: name a file in it")
    if is_file(source) and not path.is_file():
        there = "" if path.is_absolute() else f" at {os.path.abspath(path)}"
        near = _nearest_name(path)
        meant = f"; did you mean {near}?" if near else ": correct the path of this data source"
        raise ValueError(f"{source.path}: there is no such file{there}{meant}")
    if not is_file(source) and path.is_file():
        raise ValueError(
            f"{source.path}: data files end with {', '.join(TEXT_SUFFIXES)} (compressed: also with"
            f" {' or '.join(COMPRESSED)}) or .parquet: convert or rename this one"
        )
    if not is_text(source.path):
        yield from _dataset_rows(source, first)
    elif data_suffix(path) == ".csv":
        yield from islice(_csv_rows(source.path), first)
    else:
        yield from islice(_json_rows(source.path), first)


def _nearest_name(path: Path) -> str | None:
    """Returns the file name in the folder of `path` with the most similar stem, or None if none is
    similar."""
    try:
        names = {Path(name).stem: name for name in os.listdir(path.parent)}
    except OSError:
        return None
    near = difflib.get_close_matches(path.stem, names, n=1)
    return names[near[0]] if near else None


def _json_rows(path: str) -> Iterator[Row]:
    """Yields the objects of a file with one JSON object per line, or with one JSON list of objects."""
    try:
        with opened_rows(path) as lines:
            is_list = lines.first_character() == "["
        with opened_rows(path) as lines:
            rows = _json(path, lines.whole()) if is_list else _json_lines(path, lines)
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{path}, row {number}: must be a JSON object with columns, found"
                        f" {type(row).__name__}"
                    )
                yield row
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error


def _json_lines(path: str, lines: RowLines) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        lines.end_row()
        if line.strip():
            yield _json(f"{path}, line {number}", line.rstrip())


def _json(where: str, text: str) -> Any:
    try:
        value = json.loads(text)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # rejects a lone surrogate
        return value
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where}: holds {half!r}, half of a character: correct or drop the row") from None
    except json.JSONDecodeError as error:
        place = (
            f"line {error.lineno}, character {error.colno}"
            if error.lineno > 1
            else f"character {error.colno}"
        )
        raise ValueError(
            f"{where}: is not valid JSON: {error.msg.removesuffix(' at')} at {place}: correct or drop the row"
        ) from error
    except RecursionError:
        raise ValueError(
            f"{where}: is not valid JSON: its brackets are nested too deeply to be read: correct or drop"
            " the row"
        ) from None
    except ValueError as error:  # a number with too many digits
        raise ValueError(f"{where}: is not valid JSON: {error}: correct or drop the row") from error


def _csv_rows(path: str) -> Iterator[Row]:
    """Yields the rows of a CSV file with a header; every value is text."""
    csv.field_size_limit(2**31 - 1)  # the default rejects cells over 128 KiB
    try:
        with opened_rows(path, newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines, strict=True), start=1):
                lines.end_row()
                if None in row or None in row.values():
                    raise ValueError(
                        f"{path}, row {number}: has another number of cells than the header: correct or quote"
                        " its cells"
                    )
                yield row
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except csv.Error as error:
        raise ValueError(f"{path}: is not valid CSV: {error}: correct the quotes of its cells") from error


def _not_utf8(path: str) -> ValueError:
    """Returns the error for a file that is not UTF-8, naming the first invalid line."""
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return ValueError(f"{path}: is in UTF-16: save the file as UTF-8")
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = f"{line[error.start]:#04x} at byte {error.start + 1}"
                return ValueError(f"{path}, line {number}: is not UTF-8 ({byte}): save the file as UTF-8")
    return ValueError(f"{path}: is not UTF-8: save the file as UTF-8")


def _hub_rows(source: Source, streaming: bool) -> Any:
    """Returns the split of a Hub data set. Raises ValueError if its card names files outside its repository,
    such as files on this machine."""
    from datasets import load_dataset_builder

    repo_id, revision = parted(source.path)
    builder = load_dataset_builder(repo_id, revision=revision)
    files = [str(file) for split in (builder.config.data_files or {}).values() for file in split]
    foreign = [file for file in files if not file.startswith(f"hf://datasets/{repo_id}@")]
    if foreign:
        raise ValueError(
            f"its card names {foreign[0]}, which is no file of {repo_id}: only files of its own are read"
        )
    if streaming:
        return _encoded(builder.as_streaming_dataset(split=source.split))
    builder.download_and_prepare()
    return _encoded(builder.as_dataset(split=source.split))


def _encoded(rows: Any) -> Any:
    """Returns a data set whose images, sounds and videos stay encoded as {bytes, path}. Images are decoded
    later, within limits (see `picture_decoding`). Other columns stay unchanged."""
    if rows.features is None:
        return rows
    encoded = {name: _without_decoding(feature) for name, feature in rows.features.items()}
    if encoded == dict(rows.features):
        return rows
    from datasets import Features, IterableDataset

    lazy = rows if isinstance(rows, IterableDataset) else rows.to_iterable_dataset()
    return lazy.cast(Features(encoded))


def _without_decoding(feature: Any) -> Any:
    """Returns a `datasets` feature in which media are not decoded."""
    from datasets import Audio, Image, LargeList, List, Video

    if isinstance(feature, Audio | Image | Video):
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, Mapping):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_without_decoding(inner) for inner in feature]
    if isinstance(feature, List | LargeList):
        return dataclasses.replace(feature, feature=_without_decoding(feature.feature))
    return feature


def _dataset_rows(source: Source, first: int | None) -> Iterator[Row]:
    # Imported here, because it takes most of a second and text files do not need it.
    from datasets import load_dataset

    parquet = Path(source.path).suffix == ".parquet"
    try:
        if parquet:
            rows = _encoded(load_dataset("parquet", data_files=source.path, split="train", streaming=True))
        else:
            rows = _hub_rows(source, streaming=first is not None)
        yield from islice(rows, first)
    except StopIteration:  # raised for an empty file
        return
    except Exception as error:  # from many libraries; any error means that the source cannot be read
        kind = "parquet" if parquet else f"a Hub data set with the split {source.split!r}"
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(
            f"{source.path}: cannot be read as {kind}: {type(error).__name__}: {cause}"
        ) from error
