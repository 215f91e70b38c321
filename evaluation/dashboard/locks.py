"""Determines which lock files are held from Linux's /proc/locks, without touching the files.

`is_locked` in system/files.py briefly takes a lock and writes to its file. A page that did so every second
could keep a stage from getting its own lock. Locks of processes in other containers and on other machines are
not listed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

LOCKS = Path("/proc/locks")
# held locks only; "-> " marks waiting ones
HELD = re.compile(r"^\d+: FLOCK\s+\S+\s+WRITE (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.M)


class Locks:
    """The locks held at one moment."""

    def __init__(self, listing: Path = LOCKS):
        try:
            found = HELD.findall(listing.read_text())
        except OSError:
            found = []
        self._held = {(int(inode), int(major, 16), int(minor, 16)) for _, major, minor, inode in found}
        self._inodes = {inode for inode, _, _ in self._held}

    def held(self, file: Path) -> bool:
        """Returns whether a process on this machine holds a lock file."""
        if not self._held:
            return False
        try:
            about = file.lstat()
        except OSError:
            return False
        major = os.major(about.st_dev)
        minor = os.minor(about.st_dev)
        if major == 0:  # on overlayfs and btrfs the listing has a different device
            return about.st_ino in self._inodes
        return (about.st_ino, major, minor) in self._held
