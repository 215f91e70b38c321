"""Hides from other users of the machine: secrets such as the password (Prefect's auth string), sockets and stores of our processes."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def kept_secret(place: Path, prefix: str = "") -> str:
    """Returns the secret in a file; makes a new one when there is none, or when other users can read it."""
    with suppress(OSError), open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        about, there = os.fstat(file.fileno()), file.read().strip()
        if there and about.st_uid == os.getuid() and not about.st_mode & 0o077:
            return there
    made = f"{prefix}{secrets.token_urlsafe(32)}"
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)  # with mode 0600
    with open(descriptor, "w") as file:
        file.write(f"{made}\n")
    os.replace(part, place)
    return made


def private_folder(parent: Path) -> Path:
    """Returns a folder that only this user can enter; a new one when another user can write to, or owns, what has its name."""
    place = parent / f"alignflow-{os.getuid()}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    about = place.lstat()
    mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
    return place if mine else Path(tempfile.mkdtemp(prefix="alignflow-", dir=parent))
