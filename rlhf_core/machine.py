"""What this machine has, told without torch: CPUs this process may use, GPUs it can see, room to write."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def num_cpus() -> int:
    """CPUs this process may run on: its affinity, and a container's quota where there is one."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cpus, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cpus


def num_gpus() -> int:
    """NVIDIA GPUs this process can see."""
    devices = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


NO_ROOM = {
    errno.ENOSPC: "there is no room left on its disk; make some",
    errno.EDQUOT: "the quota is used up; make room",
    errno.EROFS: "it can only be read; set another folder",
    errno.EFBIG: "a file is larger than this process may write (ulimit -f); raise the limit",
}
TORCH_CUT = "a file of tensors could not be written whole, as when its disk is full; make room"


def no_room(error: BaseException) -> str | None:
    """Why nothing more can be written, and what to do, when that is what an error or its causes say; else None.

    Libraries that write tensors in other languages raise errors of their own, with the system's number in their text.
    """
    cause: BaseException | None = error
    while cause is not None:
        for number, told in NO_ROOM.items():
            if getattr(cause, "errno", None) == number or f"(os error {number})" in str(cause) or os.strerror(number) in str(cause):
                return told
        if "inline_container.cc" in str(cause):  # torch's writer, which loses the system's number
            return TORCH_CUT
        cause = cause.__cause__ or cause.__context__
    return None
