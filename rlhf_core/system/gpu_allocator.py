"""Turns PyTorch's expandable segments off where they do not work.

PyTorch's allocator uses them, to avoid fragmentation, when the user sets `expandable_segments:True` in PYTORCH_ALLOC_CONF (or
PYTORCH_CUDA_ALLOC_CONF, its older name). Other processes cannot open such memory by a CUDA IPC handle, and vLLM's sleep mode uses a
memory pool of its own that does not support them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch reads the first that is not empty
SEGMENTS = "expandable_segments"


def give_up_segments(environment: MutableMapping[str, str]) -> None:
    """Removes the setting from an environment. Call it before the process allocates GPU memory."""
    for name in VARIABLES:
        if environment.get(name):
            environment[name] = _others(environment[name])
        if not environment.get(name):
            environment.pop(name, None)


def wants_segments() -> bool:
    """Returns whether the environment turns expandable segments on."""
    return f"{SEGMENTS}:True" in _settings()


def shared_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised tensor of `size` bytes, uint8, in memory that other processes can open by a CUDA IPC handle."""
    import torch

    if device.type != "cuda" or not wants_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)
    _apply(",".join(filter(None, [_others(_settings()), f"{SEGMENTS}:False"])))
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        _apply(_settings())


def _settings() -> str:
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def _others(settings: str) -> str:
    return ",".join(setting for setting in settings.split(",") if setting.partition(":")[0].strip() != SEGMENTS)


def _apply(settings: str) -> None:
    """Sets the allocator's settings, all of them: what `settings` leaves out goes back to its default.

    A private function of PyTorch, made for 2.11 to 2.13. Without it the allocator stays as it is, and a line in the log says so.
    """
    import torch

    if not hasattr(torch.cuda.memory, "_set_allocator_settings"):
        print(f"this PyTorch keeps expandable segments on: take {SEGMENTS} out of {VARIABLES[0]} if weights do not arrive", flush=True)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later releases of PyTorch rename this function
        torch.cuda.memory._set_allocator_settings(settings)
