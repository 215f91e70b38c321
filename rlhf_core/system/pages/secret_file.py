"""Hides files from other users of the machine: secrets such as Prefect's auth string, and our processes'
sockets and stores."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def kept_secret(place: Path, prefix: str = "") -> str:
    """Returns the secret in a file; creates a new one if the file is missing or other users can access it."""
    with suppress(OSError), open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        about = os.fstat(file.fileno())
        there = file.read().strip()
        if there and about.st_uid == os.getuid() and not about.st_mode & 0o077:
            return there
    made = f"{prefix}{secrets.token_urlsafe(32)}"
    make_private(place.parent)
    descriptor, part = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)  # with mode 0600
    with open(descriptor, "w") as file:
        file.write(f"{made}\n")
    os.replace(part, place)
    return made


def make_private(home: Path, *files: str) -> None:
    """Makes a state folder (0700), and its files that match the patterns `files` (0600), accessible only to
    this user. Creates the folder if needed.

    For paths that another user owns, and for a folder that others may need (with the sticky bit, the working
    directory, or a folder above it), only logs a warning.
    """
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
    shared = bool(home.stat().st_mode & stat.S_ISVTX) or Path.cwd().is_relative_to(home.resolve())
    found = [(file, 0o600) for pattern in files for file in home.glob(pattern)]
    for path, mode in [(home, 0o700), *found]:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode) or not about.st_mode & 0o077:
            continue
        mine = about.st_uid == os.getuid()
        if mine and not (shared and path == home):
            path.chmod(mode)
            continue
        why = "other programs may need that" if mine else "it belongs to another user"
        told = "other users of this machine can read %s, and %s: name a folder of your own with --home"
        logging.getLogger(__name__).warning(told, path, why)


def private_folder(parent: Path) -> Path:
    """Returns a folder that only this user can access. Creates one with another name if another user owns or
    can access the usual one."""
    place = parent / f"alignflow-{os.getuid()}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    about = place.lstat()
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    return place if mine else Path(tempfile.mkdtemp(prefix="alignflow-", dir=parent))
