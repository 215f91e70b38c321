"""Memory of GPUs in segments that grow, which leave no gaps between tensors of different sizes, and where they cannot be had.

PyTorch's allocator makes them when a user says `expandable_segments:True` in PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF, its older
name). Other processes cannot open them by a plain handle, and an engine that sleeps brings a pool of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch reads the first of them that says something
SEGMENTS = "expandable_segments"


def give_up_segments(environment: MutableMapping[str, str]) -> None:
    """For a process that must not have them; called before anything asks for memory."""
    for name in VARIABLES:
        if environment.get(name):
            environment[name] = _others(environment[name])
        if not environment.get(name):
            environment.pop(name, None)


def wants_segments() -> bool:
    return f"{SEGMENTS}:True" in _settings()


def shown_bytes(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes, uint8, of no particular value, in a block that other processes can open."""
    import torch

    if device.type != "cuda" or not wants_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)
    _tell(",".join(filter(None, [_others(_settings()), f"{SEGMENTS}:False"])))
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        _tell(_settings())


def _settings() -> str:
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def _others(settings: str) -> str:
    return ",".join(setting for setting in settings.split(",") if setting.partition(":")[0].strip() != SEGMENTS)


def _tell(settings: str) -> None:
    """The allocator takes the settings as a whole: what they leave out goes back to its default."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later releases call it by another name
        torch.cuda.memory._set_allocator_settings(settings)
