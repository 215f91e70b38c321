"""What this machine has, told without torch: CPUs this process may use, GPUs it can see."""

from __future__ import annotations

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
