"""Reads the weights of a safetensors file for a model that is cut over its ranks while it loads.

Rank 0 reads large weights, and all ranks get their data from it when they are cut. Memory is used again from weight to weight: the system
takes longer to give new pages than to fill them from a file that it has read before.
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

from rlhf_core.hub.model_files import tensors_of

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LARGE = 6_400_000  # elements of a weight; each part of it is cut, too, where transformers splits it into up to 64


class Buffers:
    """Keeps memory for weights. A part is taken again when no tensor refers to it."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """Returns `size` bytes that nobody uses; gives back smaller parts before it makes a larger one."""
        free = [buffer for buffer in self._kept if sys.getrefcount(buffer) <= 3]  # the list, `buffer` and the argument
        if fitting := [buffer for buffer in free if len(buffer) >= size]:
            return min(fitting, key=len)[:size]
        self._kept = [buffer for buffer in self._kept if all(buffer is not other for other in free)]
        del free
        self._kept.append(np.empty(size, np.uint8))
        return self._kept[-1][:size]


class WeightFile:
    """Stands for an opened file of safetensors (`opened`), as transformers uses it. `reads`: False on ranks that get large weights from
    rank 0; these are nan there until they are cut."""

    def __init__(self, opened: Any, path: str, reads: bool, buffers: Buffers):
        self._opened, self._reads, self._buffers = opened, reads, buffers
        self._file = open(path, "rb", buffering=0)
        self._begin = 8 + int.from_bytes(self._file.read(8), "little")
        self._tensors = tensors_of(Path(path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __exit__(self, *error: Any) -> None:
        self._file.close()
        self._opened.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        about = self._tensors[name]
        if about["dtype"] not in DTYPES or math.prod(about["shape"]) < LARGE:
            return self._opened.get_slice(name)
        return _Large(self, name, about)

    def whole(self, name: str) -> Tensor:
        """Returns a large weight."""
        about = self._tensors[name]
        if not self._reads:
            return torch.full((), math.nan, dtype=DTYPES[about["dtype"]]).expand(about["shape"])
        start, end = about["data_offsets"]
        buffer, done = self._buffers.take(end - start), 0
        while done < end - start:
            count = os.preadv(self._file.fileno(), [buffer[done:].data], self._begin + start + done)
            if not count:
                raise OSError(f"{self._file.name} ends within the weight {name}")
            done += count
        return torch.from_numpy(buffer).view(DTYPES[about["dtype"]]).reshape(about["shape"])

    def part(self, name: str, what: Any) -> Tensor:
        """Returns a part of a weight, which every rank reads."""
        found: Tensor = self._opened.get_slice(name)[what]
        return found


class _Large:
    """Stands for the slice of a large weight."""

    def __init__(self, file: WeightFile, name: str, about: dict[str, Any]):
        self._file, self._name, self._about = file, name, about

    def get_shape(self) -> list[int]:
        return list(self._about["shape"])

    def get_dtype(self) -> str:
        return str(self._about["dtype"])

    def __getitem__(self, what: Any) -> Tensor:
        return self._file.whole(self._name) if what is Ellipsis else self._file.part(self._name, what)
