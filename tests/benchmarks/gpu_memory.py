"""Peak memory of GPUs, as their driver counts it, and of the host, all processes together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rlhf_core.system.machine import free_memory, gpu_names


def watch_memory() -> list[int]:
    """Returns the bytes in use at most on each GPU that this process can see, in a list that a thread keeps
    up to date five times a second until the process ends. Without a GPU it is empty."""
    names = gpu_names()
    if not names:
        return []
    import pynvml

    pynvml.nvmlInit()
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(int(n)) if n.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(n)
        for n in names
    ]
    peaks = [0] * len(handles)

    def look() -> None:
        while True:
            for i, handle in enumerate(handles):
                peaks[i] = max(peaks[i], pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            time.sleep(0.2)

    threading.Thread(target=look, daemon=True).start()
    return peaks


def watch_host() -> list[int]:
    """Returns a list of one number: the bytes by which free host memory was at most lower than now. Pinned
    memory is among them, files that the system caches are not. A thread keeps it up to date five times a
    second until the process ends."""
    before = free_memory()
    peak = [0]

    def look() -> None:
        while True:
            peak[0] = max(peak[0], before - free_memory())
            time.sleep(0.2)

    threading.Thread(target=look, daemon=True).start()
    return peak


def in_gib(sizes: Sequence[float]) -> list[float]:
    return [round(size / 2**30, 1) for size in sizes]
