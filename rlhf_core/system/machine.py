"""Counts this process's CPUs, GPUs and free memory, and explains disk write errors. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

import psutil


class MachineLacks(RuntimeError):
    """Raised when the recipe is valid but this machine lacks something that it needs. The message has a
    one-line sentence for each missing thing."""


class NodeLost(RuntimeError):
    """Raised when a node of the Ray cluster, or its head, has ended or cannot be reached. The stage can
    continue when it is restarted."""


class Unreachable(ConnectionError):
    """Raised when every attempt to reach a service got no answer, or a reply that the service is busy or
    down. The message is one sentence."""


def num_cpus() -> int:
    """Returns the number of CPUs this process may use: its affinity, limited by a container's quota (cgroup
    v2)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cpus, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cpus


def num_gpus() -> int:
    """Returns the number of NVIDIA GPUs this process can see: its device files, limited by
    CUDA_VISIBLE_DEVICES."""
    devices = gpu_devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def gpu_devices() -> int:
    """Returns the number of NVIDIA GPUs of this machine or container, from its device files."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def free_memory() -> int:
    """Returns the bytes of host memory available without swapping, limited by a container's memory limit
    (cgroup v2)."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[
            "inactive_file"
        ]
        return min(free, limit - used + int(cached))
    except (OSError, ValueError):
        return free


def give_back_freed_memory() -> None:
    """Makes the C library return freed memory to the system now, and freed blocks above 1 MiB immediately
    from now on; otherwise it keeps hundreds of megabytes. Each such block then costs a system call. Does
    nothing if the C library is not glibc."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**20)  # M_TRIM_THRESHOLD
        libc.malloc_trim(0)


def gpu_names() -> tuple[str, ...]:
    """Returns the GPUs that this process can see, as a child's CUDA_VISIBLE_DEVICES must name them: by
    number, or by the names in this process's own variable."""
    visible = [
        device.strip()
        for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if device.strip() not in ("", "-1")
    ]
    return tuple(visible[: num_gpus()]) if visible else tuple(str(i) for i in range(num_gpus()))


DISK_PROBLEMS = {
    errno.ENOSPC: "its disk is full; free some space",
    errno.EDQUOT: "the quota is used up; free some space",
    errno.EROFS: "it can only be read; set another folder",
    errno.EFBIG: "a file is larger than this process may write (ulimit -f); raise the limit",
}


def disk_problem(error: BaseException) -> str | None:
    """Returns the reason why the disk cannot be written to, and the remedy, if an error or one of its causes
    comes from the disk; otherwise None.

    Libraries in other languages (safetensors) raise their own classes, with the errno in the message.
    """
    cause: BaseException | None = error
    while cause is not None:
        for number, reason in DISK_PROBLEMS.items():
            if (
                getattr(cause, "errno", None) == number
                or f"(os error {number})" in str(cause)
                or os.strerror(number) in str(cause)
            ):
                return reason
        cause = cause.__cause__ or cause.__context__
    return None
