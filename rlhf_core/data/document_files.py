"""Stores documents in memory-mapped files, so that a data set can be larger than memory. Torch-free.

One pass over the rows writes flat files. A training step maps these files and reads only the documents it
needs. A token and its mask bit share one int32. The files stay in `state/` of the run directory until the
stage is done. A resumed stage therefore does not tokenise again, and the ranks of a stage tokenise only once.
A folder gets its final name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from rlhf_core.data.documents import Document, Lazy
from rlhf_core.data.pictures.picture_source import EncodedPicture
from rlhf_core.data.pictures.stored_pictures import PictureWriter, StoredPictures
from rlhf_core.data.survey import DataReport, Loaded, Survey
from rlhf_core.system.files import locked, sync_to_disk

TOKENS = "tokens.i32"
ENDS = "ends.i64"
PLACES = "places.i64"
VALUES = "values.f64"
ORDER = "order.i64"
REPORT = "report.json"
PROMPTS = "prompts.npy"
WAIT_SECONDS = 24 * 3600


class ItemShape(NamedTuple):
    """Describes how an item is stored: `width` documents and one number, from which `restore` builds the
    item."""

    width: int
    restore: Callable[[Sequence[Document], float], Any]


class Writer:
    """Appends items to the files in a folder. `items`, `tokens` and `images` are the numbers written so
    far."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, BinaryIO] = {
            name: (folder / name).open("wb") for name in (TOKENS, ENDS, PLACES, VALUES)
        }
        self._pictures = PictureWriter(folder)
        self.items = self.tokens = self.images = 0

    def add(self, place: int, documents: Sequence[Document], value: float) -> None:
        """Appends an item. `place` is its position in the final order. Items with the same place keep the
        order of writing."""
        for document in documents:
            coded = np.array(document.tokens, dtype=np.int32) << 1 | np.array(document.mask, dtype=np.int32)
            self.tokens += len(document)
            self._files[TOKENS].write(coded.tobytes())
            self._files[ENDS].write(np.int64(self.tokens).tobytes())
            self._pictures.add(document.pictures)
            self.images += len(document.pictures)
        self._files[PLACES].write(np.int64(place).tobytes())
        self._files[VALUES].write(np.float64(value).tobytes())
        self.items += 1

    def close(self, report: DataReport) -> None:
        """Sorts the items by `place` and writes the order and the report."""
        for file in self._files.values():
            file.close()
        self._pictures.close()
        np.argsort(np.fromfile(self._folder / PLACES, dtype=np.int64), kind="stable").astype(np.int64).tofile(
            self._folder / ORDER
        )
        np.save(self._folder / PROMPTS, report.prompts, allow_pickle=False)
        (self._folder / REPORT).write_text(report.survey.model_dump_json())


def stored(
    folder: Path | None, key: str, shape: ItemShape, build: Callable[[Writer], DataReport]
) -> Loaded[Any]:
    """Returns the items stored under `key` in a folder, after `build` has written them if they are missing.
    Uses a temporary folder if `folder` is None.

    If several processes call this, one builds and the others wait. Raises TimeoutError after waiting for a
    day.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="alignflow-data-") as temporary:
            # a mapped file stays readable after it is deleted
            return _opened(_built(Path(temporary) / key, build), shape)
    with locked(folder / f".{key}.lock", WAIT_SECONDS) as ours:
        if not ours:
            raise TimeoutError(
                f"another process has been reading the data into {folder} for {WAIT_SECONDS} s"
            )
        with suppress(OSError, ValueError, EOFError):  # missing or incomplete
            return _opened(folder / key, shape)
        return _opened(_built(folder / key, build, sync_to_disk), shape)


def _built(
    whole: Path, build: Callable[[Writer], DataReport], sync: Callable[[Path], None] = lambda part: None
) -> Path:
    part = whole.with_name(f".{whole.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    writer = Writer(part)
    writer.close(build(writer))
    sync(part)
    shutil.rmtree(whole, ignore_errors=True)
    os.replace(part, whole)
    return whole


def _opened(folder: Path, shape: ItemShape) -> Loaded[Any]:
    """Returns the items in a folder. Raises OSError, ValueError or EOFError if a file is missing or
    truncated."""
    tokens, ends, values, order = (
        # a plain array of the mapped memory is faster to slice
        np.memmap(folder / name, dtype=kind, mode="r").view(np.ndarray)
        for name, kind in ((TOKENS, np.int32), (ENDS, np.int64), (VALUES, np.float64), (ORDER, np.int64))
    )
    if not (len(order) == len(values) and len(ends) == len(values) * shape.width and len(tokens) == ends[-1]):
        raise ValueError(f"{folder} is not complete: remove it")
    pictures = StoredPictures(folder)

    def get(index: int) -> Any:
        item = int(order[index])
        first = item * shape.width
        documents = [
            _document(tokens[int(ends[at - 1]) if at else 0 : int(ends[at])], pictures.of(at))
            for at in range(first, first + shape.width)
        ]
        return shape.restore(documents, float(values[item]))

    survey = Survey.model_validate_json((folder / REPORT).read_text())
    return Loaded(
        Lazy(len(order), get),
        DataReport(survey, np.load(folder / PROMPTS, mmap_mode="r", allow_pickle=False)),
    )


def _document(coded: np.ndarray, pictures: tuple[EncodedPicture, ...]) -> Document:
    return Document((coded >> 1).tolist(), (coded & 1).astype(bool).tolist(), pictures=pictures)
