"""Stores the images of documents next to the documents' files, as encoded bytes or as paths. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf_core.data.pictures.picture_source import EncodedPicture, PictureSource

RECORDS = "pictures.i64"
CONTENT = "pictures.bin"
# Columns of the records: index of the document, `EncodedPicture.start` and `stop`, whether the content is a
# path, and its start and end in `CONTENT`.
WIDTH = 6


class PictureWriter:
    """Appends the images of documents to the files in a folder."""

    def __init__(self, folder: Path):
        self._records = (folder / RECORDS).open("wb")
        self._content = (folder / CONTENT).open("wb")
        self._documents = 0
        self._end = 0

    def add(self, pictures: Sequence[EncodedPicture]) -> None:
        """Appends the images of the next document."""
        for picture in pictures:
            is_path = not len(picture.source.data)
            content = os.fsencode(picture.source.file) if is_path else bytes(picture.source.data)
            self._content.write(content)
            begin = self._end
            self._end += len(content)
            record = (self._documents, picture.start, picture.stop, int(is_path), begin, self._end)
            self._records.write(np.array(record, dtype=np.int64).tobytes())
        self._documents += 1

    def close(self) -> None:
        self._records.close()
        self._content.close()


class StoredPictures:
    """Reads the images of documents. Bytes stay in the mapped file until they are decoded."""

    def __init__(self, folder: Path):
        """Opens the files. Raises OSError if a file is missing, and ValueError if a file is truncated."""
        records = np.fromfile(folder / RECORDS, dtype=np.int64)
        self._records = records.reshape(-1, WIDTH)
        size = (folder / CONTENT).stat().st_size
        if len(self._records) and self._records[-1, -1] != size:
            raise ValueError(f"{folder} is not complete: remove it")
        self._content = (
            np.memmap(folder / CONTENT, dtype=np.uint8, mode="r").data if size else memoryview(b"")
        )

    def of(self, document: int) -> tuple[EncodedPicture, ...]:
        """Returns the images of the document with this index."""
        first, last = np.searchsorted(self._records[:, 0], [document, document + 1])
        return tuple(self._picture(record.tolist()) for record in self._records[first:last])

    def _picture(self, record: list[int]) -> EncodedPicture:
        _, start, stop, is_path, begin, end = record
        content = self._content[begin:end]
        if is_path:
            folder, name = os.path.split(os.fsdecode(bytes(content)))
            return EncodedPicture(start, stop, PictureSource(name, folder))
        return EncodedPicture(start, stop, PictureSource("", None, content))
