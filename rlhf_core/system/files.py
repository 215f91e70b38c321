"""Digests local files and folders with a cache, writes files atomically, and locks them.

Digests are cached in `<artifacts>/.digests.json` by path, size and mtime. The digest of a file changed within
the last two seconds is not cached, so that a second change in the same clock tick is noticed. A missing path
has the digest `absent`, so that a recipe can be planned on a machine without its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_core.system import progress

ABSENT = "absent"
SETTLED_SECONDS = 2.0

_hashed: dict[tuple[int, int, int, int], str] = {}  # the results of `file_digest`, by `_identity`


class Digests:
    """SHA-256 digests of files, cached in `folder` if that is given, exists and is writable."""

    def __init__(self, folder: Path | None = None):
        self._store = (folder or Path(os.devnull)) / ".digests.json"
        self._known: dict[str, Any] = read_json(self._store)
        self._before = dict(self._known)

    def of(self, path: Path) -> str:
        """Returns the digest of a file, or of the names and contents of a folder's files except hidden files;
        `absent` if the path does not exist."""
        if os.path.isfile(path):  # also False for a name that no file system accepts
            return self._file(path.resolve())
        if not os.path.isdir(path):
            return ABSENT
        inside = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        names = sorted(name for name in inside if not any(part.startswith(".") for part in name.parts))
        return digest({name.as_posix(): self._file((path / name).resolve()) for name in names})

    def names_in(self, path: Path, read: Callable[[Path], list[str]]) -> list[str]:
        """Returns the names that `read` finds in a file, cached like the file's digest, under the name of
        `read`."""
        return list(self._cached(f"{read.__name__} {path.resolve()}", [path], lambda: read(path)))

    def together(self, title: str, files: Mapping[str, Path]) -> str:
        """Returns the digest of the names and contents of many files, cached as one: a missing file counts as
        `absent`."""
        return str(
            self._cached(
                title,
                list(files.values()),
                lambda: digest(
                    {
                        name: file_digest(path) if os.path.isfile(path) else ABSENT
                        for name, path in files.items()
                    }
                ),
            )
        )

    def _cached(self, title: str, paths: Sequence[Path], make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, which is called once per state of these files (path, size and
        mtime)."""
        states = [_state(path) for path in paths]
        state = digest(states)
        known = self._known.get(title)
        if isinstance(known, list) and known[:2] == [state, len(paths)]:
            return known[2]
        found = make()
        newest = max((state[2] for state in states), default=0)
        if time.time() - newest / 1e9 > SETTLED_SECONDS:
            self._known[title] = [state, len(paths), found]
        return found

    def save(self) -> None:
        """Writes new digests to the cache. A missing or read-only folder is not an error, because the cache
        only saves time."""
        if self._known != self._before:
            with contextlib.suppress(OSError, ValueError):
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


def _state(path: Path) -> tuple[str, int, int]:
    """Returns a file's path, size and mtime; -1 and 0 if it is missing."""
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # the latter: a null character in the path
        return str(path), -1, 0
    return str(path), info.st_size, info.st_mtime_ns


@contextlib.contextmanager
def locked(path: Path, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Holds a lock file until the block ends; the system releases it if the process dies. Yields whether the
    lock was acquired within `wait_seconds`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=wait_seconds)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Returns whether a process holds a lock file; also true if the file cannot be opened."""
    if not path.exists():
        return False
    try:
        with locked(path) as free:
            return not free
    except OSError:
        return True


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: a reader sees either the old contents or the new."""
    write_bytes(path, text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} when the file is missing, truncated or not a JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def tail(path: Path, count: int = 1) -> str:
    """Returns the last `count` non-blank lines in the last 20,000 bytes of a log, without colour codes; '' if
    there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace")).splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-count:])


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically, like `write_text`. Its OSErrors always name the file; Python's own errors do
    not if the disk is full."""
    # machines that share the folder may have equal process ids
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def link_tree(source: Path, target: Path) -> None:
    """Creates the folder `target` with hard links to the files of `source`, or copies if the file system has
    no links."""
    shutil.rmtree(target, ignore_errors=True)  # left by a killed attempt
    shutil.copytree(source, target, copy_function=_linked)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync_to_disk(*places: Path) -> None:
    """Calls fsync on files and folders and everything in them, so that their contents survive a power
    failure."""
    for place in places:
        for path in (place, *place.rglob("*")) if place.is_dir() else (place,):
            folder = path.is_dir()
            if not folder and not path.is_file():
                continue
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            except OSError:
                if not folder:  # some file systems do not support fsync of a folder
                    raise
            finally:
                os.close(handle)
            progress.made()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hex. A process reads a file and its hard links only once, unless the
    size or mtime changes."""
    identity = _identity(path)  # taken before reading, because a file replaced meanwhile has another identity
    known = _hashed.get(identity)
    if known is not None:
        return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - path.stat().st_mtime > SETTLED_SECONDS:
        _hashed[identity] = found
    return found


def remember_digest(path: Path, sha256: str) -> None:
    """Makes `file_digest` return a known digest for a file until the file's size or mtime changes."""
    _hashed[_identity(path)] = sha256


def _identity(path: Path) -> tuple[int, int, int, int]:
    """Returns (device, inode, size, mtime in nanoseconds), which is equal for all hard links of an unchanged
    file."""
    info = path.stat()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def digest(value: object) -> str:
    """Returns 16 hex digits of the SHA-256 of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
