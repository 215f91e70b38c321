"""Copies a rank's training state to host memory and writes it on a thread during the following steps (as in
CheckFreq, Mohan et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from rlhf_core.system.machine import free_memory, gpu_devices
from rlhf_core.training.state_files import WeightPart, by_key, write_tensors

CHUNK = 2**26  # fp32 elements per piece of host memory: pinned memory is rounded up to a power of two
SHARE = 0.4  # share of free memory for all copies on a node: two models may save at once


class StateWriter:
    """Writes the states of one rank, one after another."""

    def __init__(self, rank: int, world_size: int):
        self._rank = rank
        self._neighbours = min(world_size, gpu_devices() or world_size)
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._chunks: list[Tensor] = []
        self._used = 0

    def start(self, folder: Path, steps: float, parts: Iterable[WeightPart]) -> None:
        """Copies a state to host memory and writes it in the background; the tensors may then change. If host
        memory is short, writes it before returning. Raises the same errors as `finish`."""
        self.finish()
        tensors = by_key(parts)
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = free_memory()
        if needed * self._neighbours > SHARE * free:
            sizes = (
                f"it has {needed / 2**30:.1f} GiB on each rank, and {free / 2**30:.1f} GiB of host memory are"
                " free"
            )
            print(f"training waits while the resume state is written: {sizes}", flush=True)
            write_tensors(folder, self._rank, steps, {key: [tensor] for key, tensor in tensors.items()})
            return
        copies = {key: self._copy(tensor) for key, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._thread = Thread(
            target=self._write, args=(folder, steps, copies), name="state writer", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises the error that ended the last write, such as OSError from a full disk."""
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def finish(self) -> None:
        """Waits until the last state is written. Raises the same errors as `check`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._used = 0
            if not torch.cuda.is_available():
                self._chunks.clear()  # pinned memory is kept otherwise: allocating it takes seconds
        self.check()

    def _copy(self, tensor: Tensor) -> list[Tensor]:
        """Copies a flat tensor into the next free pieces of host memory."""
        pieces = list[Tensor]()
        flat = tensor
        while not pieces or len(flat):
            chunk, first = divmod(self._used, CHUNK)
            if chunk == len(self._chunks):
                self._chunks.append(torch.empty(CHUNK, pin_memory=torch.cuda.is_available()))
            piece = self._chunks[chunk][first : first + len(flat)]
            pieces.append(piece.copy_(flat[: len(piece)], non_blocking=True))
            self._used = self._used + len(piece)
            flat = flat[len(piece) :]
        return pieces

    def _write(self, folder: Path, steps: float, copies: Mapping[str, Sequence[Tensor]]) -> None:
        try:
            write_tensors(folder, self._rank, steps, copies)
        except BaseException as error:  # re-raised in the main thread
            self._error = error
