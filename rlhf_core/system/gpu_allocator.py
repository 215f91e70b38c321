"""Controls three aspects of PyTorch's allocators: expandable segments, which do not work everywhere; the size
of pinned blocks; and unused memory that the allocators keep.

PyTorch's GPU allocator uses expandable segments, to avoid fragmentation, when the user sets
`expandable_segments:True` in PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF, its older name). Other processes
cannot open such memory through a CUDA IPC handle, and the memory pool of vLLM's sleep mode does not support
such segments. PyTorch's pinned-memory allocator rounds each block up to a power of two.
"""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch reads the first that is not empty
SEGMENTS = "expandable_segments"
BLOCK = 2**32  # largest size, in bytes, of a block of pinned memory that tensors share
ROUNDED = 1.5  # bytes pinned per byte of weights that are pinned one by one: 1 to 2, depending on shapes


def give_up_segments(environment: MutableMapping[str, str]) -> None:
    """Removes the expandable-segments setting from an environment. Must be called before the process
    allocates GPU memory."""
    for name in VARIABLES:
        if environment.get(name):
            environment[name] = _others(environment[name])
        if not environment.get(name):
            environment.pop(name, None)


def wants_segments() -> bool:
    """Returns whether the environment turns expandable segments on."""
    return f"{SEGMENTS}:True" in _settings()


def shared_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised uint8 tensor of `size` bytes in memory that other processes can open through a
    CUDA IPC handle."""
    import torch

    if device.type != "cuda" or not wants_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)
    _apply(",".join(filter(None, [_others(_settings()), f"{SEGMENTS}:False"])))
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    finally:
        _apply(_settings())


def free_unused() -> None:
    """Frees GPU memory that this process no longer uses. An engine in another process, which reserves a share
    of the whole GPU, needs this memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pinned_bytes(size: float) -> float:
    """Returns how many bytes of host memory a pinned block of `size` bytes occupies."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0


def move_to_pinned(tensors: Sequence[torch.Tensor]) -> None:
    """Moves the data of tensors into shared blocks of pinned host memory, or of ordinary memory without CUDA.
    The largest tensors go first, each into the first block with room. This pins little more memory than the
    tensors hold, and at most one block's data exists twice on the host."""
    import torch

    def aligned(tensor: torch.Tensor) -> int:
        return -(-tensor.nbytes // 64) * 64

    blocks: list[torch.Tensor] = []  # the free part of each block
    left = sum(map(aligned, tensors))
    for tensor in sorted(tensors, key=aligned, reverse=True):
        size = aligned(tensor)
        place = next((i for i, block in enumerate(blocks) if len(block) >= size), len(blocks))
        if place == len(blocks):
            shared = min(BLOCK, 2 ** (left.bit_length() - 1)) if left else 0  # power of two, to be filled
            taken = int(max(pinned_bytes(size), shared))
            blocks.append(torch.empty(taken, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        tensor.data = blocks[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        blocks[place] = blocks[place][size:]
        left = left - size


def _settings() -> str:
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def _others(settings: str) -> str:
    return ",".join(
        setting for setting in settings.split(",") if setting.partition(":")[0].strip() != SEGMENTS
    )


def _apply(settings: str) -> None:
    """Replaces all settings of the allocator; options that are not in `settings` return to their defaults.

    Uses a private function of PyTorch 2.11 to 2.13. If it is missing, leaves the allocator unchanged and logs
    a line.
    """
    import torch

    if not hasattr(torch.cuda.memory, "_set_allocator_settings"):
        print(
            f"this PyTorch keeps expandable segments on: take {SEGMENTS} out of {VARIABLES[0]} if weights do"
            " not arrive",
            flush=True,
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # later releases of PyTorch rename this function
        torch.cuda.memory._set_allocator_settings(settings)
