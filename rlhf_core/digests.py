"""Digests of local files and folders, each file read once: kept in `<artifacts>/.digests.json` by path, size and mtime.

A file changed within the last two seconds is not kept, so that a second change in the same tick of the clock is seen.
What is missing has the digest `absent`: a recipe can be planned where its files are not.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from rlhf_core.stage import digest, file_digest, write_text

ABSENT = "absent"
SETTLED_SECONDS = 2.0


class Digests:
    """SHA-256 digests of files, with a memory that outlives the process when `folder` exists and can be written to."""

    def __init__(self, folder: Path):
        self._store = folder / ".digests.json"
        self._known: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = dict(json.loads(self._store.read_text()))
        self._before = dict(self._known)

    def of(self, path: Path) -> str:
        """Digest of a file, or of a folder's names and contents (hidden ones left out); `absent` when there is neither."""
        if path.is_file():
            return self._file(path.resolve())
        if not path.is_dir():
            return ABSENT
        inside = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        names = sorted(name for name in inside if not any(part.startswith(".") for part in name.parts))
        return digest({name.as_posix(): self._file((path / name).resolve()) for name in names})

    def save(self) -> None:
        """Keeps what was learned. Only a saving of time: a folder that is missing or read-only is no error."""
        if self._known != self._before:
            with contextlib.suppress(OSError):
                write_text(self._store, json.dumps(self._known, indent=0))

    def _file(self, path: Path) -> str:
        info = path.stat()
        known = self._known.get(str(path))
        if isinstance(known, list) and known[:2] == [info.st_size, info.st_mtime_ns]:
            return str(known[2])
        found = file_digest(path)
        if time.time() - info.st_mtime > SETTLED_SECONDS:
            self._known[str(path)] = [info.st_size, info.st_mtime_ns, found]
        return found
