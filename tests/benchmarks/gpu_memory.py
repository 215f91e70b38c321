"""Peak memory of GPUs as their driver counts it, all processes together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rlhf_core.system.machine import gpu_names


def watch_memory() -> list[int]:
    """Returns the bytes in use at most on each GPU that this process can see, in a list that a thread keeps up to date five times a
    second until the process ends. Without a GPU it is empty."""
    if not (names := gpu_names()):
        return []
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(int(n)) if n.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(n) for n in names]
    peaks = [0] * len(handles)

    def look() -> None:
        while True:
            for i, handle in enumerate(handles):
                peaks[i] = max(peaks[i], pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            time.sleep(0.2)

    threading.Thread(target=look, daemon=True).start()
    return peaks


def in_gib(sizes: Sequence[float]) -> list[float]:
    return [round(size / 2**30, 1) for size in sizes]
