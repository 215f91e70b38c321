"""A small disk for the town, which can be full: a tmpfs that only this program and its children see, in a
user namespace of their own.

It needs util-linux and a kernel that lets users make user namespaces (Debian's default; where AppArmor or a
container forbids it, be root).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INSIDE = "TOWN_HAS_ITS_OWN_MOUNTS"
LARGEST = 2**31  # bytes


def enter_own_mounts(module: str) -> None:
    """Runs this program again in namespaces where it may mount. Raises ValueError when the system allows
    none."""
    if INSIDE in os.environ:
        return
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or str(error)
        raise ValueError(
            f"a full disk cannot be planted here, {' '.join(enter)} fails ({why}): leave full_disk out, or be"
            " root"
        ) from None
    os.environ[INSIDE] = "1"
    os.execvp(enter[0], [*enter, sys.executable, "-m", module, *sys.argv[1:]])


def mount_disk(folder: Path, mib: int) -> None:
    """Mounts an empty disk of this size at a folder, until this program and its children have ended."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "town", str(folder)], check=True)


def fill(ballast: Path, free_mib: float) -> None:
    """Writes a file until its disk has only so much space left. Raises ValueError when the disk is not a
    small one, of `mount_disk`."""
    disk = os.statvfs(ballast.parent)
    if disk.f_blocks * disk.f_frsize > LARGEST:
        raise ValueError(
            f"{ballast.parent} is on a disk that others use: a full disk is planted on a small one of its own"
        )
    left = disk.f_bavail * disk.f_frsize - round(free_mib * 2**20)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(left, 1))
