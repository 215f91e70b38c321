"""Reads the weights of a safetensors file for a model that is sharded as it is loaded.

Rank 0 reads large weights, and all ranks get their data from it when the weights are sharded. Memory is
reused from weight to weight, because the system takes longer to provide new pages than to fill them from a
cached file.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.hub.model_files import stored_tensors, tensors_of

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# elements of a weight; if transformers splits it, into up to 64 parts, each part must be sharded too
LARGE = 6_400_000


EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
PIECE = 2**26  # bytes compared at a time
# references to an otherwise unused buffer: from the list, the loop and the argument, in CPython to 3.13
FREE = 3
SPARE = 2  # buffers that are kept in addition to the one taken


class Buffers:
    """Keeps memory for weights. A buffer is reused once no tensor refers to it."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """Returns `size` unused bytes. Frees smaller buffers before allocating a larger one."""
        free = [buffer for buffer in self._kept if sys.getrefcount(buffer) <= FREE]
        chosen = min((buffer for buffer in free if len(buffer) >= size), key=len, default=None)
        given_up = free if chosen is None else [buffer for buffer in free if buffer is not chosen][SPARE:]
        self._kept = [buffer for buffer in self._kept if all(buffer is not other for other in given_up)]
        del free, given_up
        if chosen is None:
            chosen = np.empty(size, np.uint8)
            self._kept.append(chosen)
        return chosen[:size]


class WeightFile:
    """Wraps an opened safetensors file, `opened`, for use by transformers. `reads`: False on ranks that get
    large weights from rank 0; on these ranks, large weights are nan until they are sharded."""

    def __init__(self, opened: Any, path: str, reads: bool, buffers: Buffers):
        self._opened = opened
        self._reads = reads
        self._buffers = buffers
        self._file = open(path, "rb", buffering=0)
        self._begin = 8 + int.from_bytes(self._file.read(8), "little")
        self._tensors = tensors_of(Path(path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()
        self._opened.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        about = self._tensors[name]
        if about["dtype"] not in DTYPES or math.prod(about["shape"]) < LARGE:
            return self._opened.get_slice(name)
        return _Large(self, name, about)

    def whole(self, name: str) -> Tensor:
        """Returns a large weight, or nan without `reads`."""
        about = self._tensors[name]
        if not self._reads:
            return torch.full((), math.nan, dtype=DTYPES[about["dtype"]]).expand(about["shape"])
        start, end = about["data_offsets"]
        buffer = self._buffers.take(end - start)
        done = 0
        while done < end - start:
            count = os.preadv(self._file.fileno(), [buffer[done:].data], self._begin + start + done)
            if not count:
                raise OSError(f"{self._file.name} ends within the weight {name}")
            done += count
        return torch.from_numpy(buffer).view(DTYPES[about["dtype"]]).reshape(about["shape"])

    def part(self, name: str, what: Any) -> Tensor:
        """Returns part of a weight, which every rank reads."""
        found: Tensor = self._opened.get_slice(name)[what]
        return found


def head_of_its_own(folder: Path) -> bool:
    """Returns whether a checkpoint stores a head that differs from its embedding, regardless of its
    config."""
    found = {
        name: (folder / file, about)
        for file, tensors in stored_tensors(folder).items()
        for name, about in tensors.items()
    }
    embedding = next((found[name] for name in found if name.endswith(EMBEDDINGS)), None)
    head = found.get("lm_head.weight")
    if head is None or embedding is None:
        return False
    if any(head[1][what] != embedding[1][what] for what in ("shape", "dtype")):
        return True
    one = _bytes_of(*head)
    other = _bytes_of(*embedding)
    return any(
        not np.array_equal(one[i : i + PIECE], other[i : i + PIECE]) for i in range(0, len(one), PIECE)
    )


def _bytes_of(file: Path, about: dict[str, Any]) -> np.ndarray:
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
    start, end = about["data_offsets"]
    return np.memmap(file, np.uint8, "r", begin + start, (end - start,))


class _Large:
    """Replaces safetensors' slice of a large weight, as `WeightFile` reads it."""

    def __init__(self, file: WeightFile, name: str, about: dict[str, Any]):
        self._file = file
        self._name = name
        self._about = about

    def get_shape(self) -> list[int]:
        return list(self._about["shape"])

    def get_dtype(self) -> str:
        return str(self._about["dtype"])

    def __getitem__(self, what: Any) -> Tensor:
        return self._file.whole(self._name) if what is Ellipsis else self._file.part(self._name, what)
