"""Decodes images in threads, before the passes that need them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rlhf_core.data.documents import Document
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource

Tensors = Mapping[str, np.ndarray]
THREADS = 8  # at most
KEPT_BYTES = 1 << 30  # of decoded images, besides those that have been requested and not read


class PictureReader:
    """Reads images for a model. `token_id`: the token whose embedding an image feature replaces. `decode`:
    the function from an image to the inputs of the encoder; several threads call it concurrently.

    Keeps the most recently read images decoded, because several documents may have the same image.
    """

    def __init__(
        self, token_id: int, decode: Callable[[PictureSource], Tensors], kept_bytes: int = KEPT_BYTES
    ):
        self.token_id = token_id
        self._decode = decode
        self._kept_bytes = kept_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._requested = dict[bytes, Future[Tensors]]()
        self._read = OrderedDict[bytes, Tensors]()

    def request(self, documents: Iterable[Document]) -> None:
        """Starts decoding the documents' images. `read` raises any errors."""
        for document in documents:
            for picture in document.pictures:
                key = _key(picture.source)
                if key not in self._requested and key not in self._read:
                    self._requested[key] = self._submit(picture.source)

    def read(self, sources: Sequence[PictureSource]) -> list[Tensors]:
        """Returns the inputs of the encoder for each image, by name. Raises ValueError for an image that can
        no longer be used."""
        keys = [_key(source) for source in sources]
        found = dict[bytes, Tensors]()
        for key, source in zip(keys, sources, strict=True):
            if key not in self._requested and key not in self._read:
                self._requested[key] = self._submit(source)
        for key in dict.fromkeys(keys):
            found[key] = self._taken(key)
        self._forget()
        return [found[key] for key in keys]

    def tensors(self, source: PictureSource) -> Tensors:
        """Like `read`, but returns the inputs of the encoder for one image."""
        return self.read([source])[0]

    def _submit(self, source: PictureSource) -> Future[Tensors]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "images")
        return self._pool.submit(self._decode, source)

    def _taken(self, key: bytes) -> Tensors:
        waiting = self._requested.pop(key, None)
        if waiting is None:
            self._read.move_to_end(key)
            return self._read[key]
        try:
            tensors = waiting.result()
        except (PictureFault, OSError) as fault:
            raise ValueError(f"{fault}; it could be read when the stage began: restore it") from fault
        self._read[key] = tensors
        return tensors

    def _forget(self) -> None:
        """Drops the least recently read images until the remaining images need at most `kept_bytes`."""
        held = sum(size_of(tensors) for tensors in self._read.values())
        while held > self._kept_bytes:
            _, tensors = self._read.popitem(last=False)
            held -= size_of(tensors)


def size_of(tensors: Tensors) -> int:
    """Returns the size of an image's inputs in bytes."""
    return sum(values.nbytes for values in tensors.values())


def _key(source: PictureSource) -> bytes:
    """Returns a key of an image and its content. Uses only the path if its file no longer exists."""
    try:
        return source.version
    except (PictureFault, OSError):
        return source.identity.encode()
