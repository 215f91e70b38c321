"""Locates the encoded bytes of an image, and reads them within limits. Torch-free.

Images may come from untrusted sources, so only files in the data file's folder are read. The path is checked
as written: a link inside this folder may lead elsewhere. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any, NamedTuple

MAX_BYTES = 32 << 20  # of an encoded image
MAX_PIXELS = 64_000_000
MISSING = "image missing"
OUTSIDE = "image outside of the data's folder"
TOO_LARGE = "image too large"
OTHER_FORMAT = "image in another format"
DAMAGED = "image damaged"
ANIMATED = "image animated"
TOO_THIN = "image refused by the model's processor"
MISNAMED = "image with another suffix"  # the image is still used
CUT_AWAY = "images cut away"
TOO_LONG = "prompt with images too long"
# Reasons for dropping a row because of an image, as text for the data report.
PICTURE_FAULTS = {
    MISSING: "missing images (no such file, or an empty cell)",
    OUTSIDE: "images whose path leads out of the data file's folder",
    TOO_LARGE: f"images of more than {MAX_BYTES >> 20} MiB or {MAX_PIXELS // 1_000_000} million pixels",
    OTHER_FORMAT: "images that are not JPEG, PNG, WebP, GIF or BMP",
    DAMAGED: "images that are truncated or damaged",
    ANIMATED: "animated images, with several frames",
    TOO_THIN: "images whose shape the model's processor refuses",
}
# Image facts in the data report: the fraction of rows above which each becomes a finding, and its text.
PICTURE_FACTS = {
    **{fact: (0.0, sentence) for fact, sentence in PICTURE_FAULTS.items()},
    MISNAMED: (0.0, "images with another format's suffix (they are read by their content)"),
    CUT_AWAY: (0.01, "images beyond the token limit, left out with everything after them"),
    TOO_LONG: (0.01, "prompts with images that are longer than the token limit, which are not cut"),
}
# The first bytes of each format, and the suffixes of its files.
SUFFIXES = {
    b"\xff\xd8\xff": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    b"\x89PNG\r\n\x1a\n": (".png", ".apng"),
    b"RIFF": (".webp",),
    b"GIF8": (".gif",),
    b"BM": (".bmp", ".dib"),
}
KNOWN_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


class PictureFault(ValueError):
    """Raised when an image cannot be used. `fact`: the name of the reason in the data report."""

    def __init__(self, fact: str, sentence: str):
        super().__init__(sentence)
        self.fact = fact


class PictureSource(NamedTuple):
    """Locates an image of the data: encoded bytes (`data`), or the file `name` in the data file's `folder`.

    `name` is written as in the data, and may also be set for bytes. `folder` is None for data without a
    folder.
    """

    name: str = ""
    folder: str | None = None
    data: Any = b""  # bytes, or a memoryview of a mapped file

    @property
    def identity(self) -> str:
        """Returns a string that is equal for equal images."""
        if len(self.data):
            return hashlib.blake2b(self.data, digest_size=16).hexdigest()
        return os.path.join(self.folder or "", self.name)

    @property
    def version(self) -> bytes:
        """Returns bytes that change with the image. For a file these are its path, size and modification
        time."""
        if len(self.data):
            return self.identity.encode()
        about = os.stat(self.file)
        return os.fsencode(f"{self.file} {about.st_size} {about.st_mtime_ns}")

    def anywhere(self) -> PictureSource:
        """Returns the image with an absolute path or with its own bytes, for processes in other folders.
        Raises PictureFault if its path is outside the data's folder."""
        if len(self.data):
            return PictureSource(self.name, None, bytes(self.data))
        folder, name = os.path.split(self.file)
        return PictureSource(name, folder)

    @property
    def content_digest(self) -> str:
        """Returns a digest of the encoded image, wherever it is stored. Raises PictureFault for the same
        reasons as `encoded`."""
        return hashlib.blake2b(self.encoded(), digest_size=16).hexdigest()

    @property
    def file(self) -> str:
        """Returns the path of the image's file. Raises PictureFault if it is outside the data's folder."""
        if not self.name:
            raise PictureFault(MISSING, "an image has neither a path nor bytes: give one of them")
        root = None if self.folder is None else os.path.abspath(self.folder)
        path = None if root is None else os.path.normpath(os.path.join(root, self.name))
        if root is None or path is None or not path.startswith(root.rstrip(os.sep) + os.sep):
            raise PictureFault(
                OUTSIDE, f"the image {self.name!r:.100} is not in the data's folder: put it beside the data"
            )
        return path

    def encoded(self) -> bytes:
        """Returns the encoded image. Raises PictureFault if it is missing, too large, or not a regular file
        in the data's folder."""
        if len(self.data):
            _check_bytes(len(self.data), self.name)
            return bytes(self.data)
        path = self.file
        try:
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode):
                raise PictureFault(MISSING, f"{path} is not a file: give an image")
            _check_bytes(about.st_size, self.name)
            with open(path, "rb") as file:
                return file.read(MAX_BYTES)
        except PictureFault:
            raise
        except (OSError, ValueError) as error:  # the latter: a null character in the path
            raise PictureFault(MISSING, f"the image {self.name!r:.100} cannot be read: {error}") from error

    @property
    def is_misnamed(self) -> bool:
        """Returns whether the suffix of the name does not match the format that the first bytes indicate."""
        suffix = os.path.splitext(self.name)[1].lower()
        if suffix not in KNOWN_SUFFIXES:
            return False
        begin = bytes(self.data[:8]) if len(self.data) else self._begin()
        return not any(begin.startswith(magic) and suffix in suffixes for magic, suffixes in SUFFIXES.items())

    def _begin(self) -> bytes:
        with open(self.file, "rb") as file:
            return file.read(8)


def _check_bytes(count: int, name: str) -> None:
    if count > MAX_BYTES:
        raise PictureFault(
            TOO_LARGE, f"the image {name!r:.100} has {count:,} bytes: make it smaller, at most {MAX_BYTES:,}"
        )
    if not count:
        raise PictureFault(DAMAGED, f"the image {name!r:.100} is an empty file: replace it")


class EncodedPicture(NamedTuple):
    """Holds an image of a document. Its tokens are `tokens[start:stop]`; the first and last of these are
    image tokens. The model's features replace the image tokens in this range."""

    start: int
    stop: int
    source: PictureSource
