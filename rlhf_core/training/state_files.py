"""Reads and writes the files of a training state. Each rank writes its parts of the trained weights and of
the optimiser's moments, by name and in fp32.

A state can be read by any number of ranks under any ZeRO stage: each rank reads the elements it holds from
the files of the ranks that wrote them. The tensors in a rank's file (see `rank_file`) are named
KIND/FIRST/NAME and contain the elements of the flattened weight NAME, or of its optimiser state, starting at
element FIRST.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_core.hub.model_files import tensors_of
from rlhf_core.models.checkpoint.weight_files import fill, make_file, meta
from rlhf_core.runs.resume_state import rank_file
from rlhf_core.system import progress

KINDS = ("weight", "exp_avg", "exp_avg_sq")  # of AdamW
STEPS = "steps"  # key of the optimiser step count, a separate tensor


class WeightPart(NamedTuple):
    """A rank's part of one trained weight: the elements from `start` on, by kind (KINDS, plus others with
    Muon or a moving average), as views of the trained tensors."""

    name: str
    start: int
    tensors: Mapping[str, Tensor]


class StoredElements(NamedTuple):
    """The elements `first` to `end` - 1 of a weight, which a file holds under `key`."""

    first: int
    end: int
    file: Path
    key: str


def by_key(parts: Iterable[WeightPart]) -> dict[str, Tensor]:
    """Returns the flattened tensors of the parts, keyed by their names in the file."""
    return {
        f"{kind}/{part.start}/{part.name}": tensor.detach().reshape(-1)
        for part in parts
        for kind, tensor in part.tensors.items()
    }


def write_tensors(folder: Path, rank: int, steps: float, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Writes one rank's file, tensor by tensor. `tensors`: from `by_key`, each in pieces. The file is renamed
    into place once it is complete."""
    file = folder / rank_file(rank)
    begun = file.with_name(f".{file.name}")
    shapes = {key: meta((sum(map(len, pieces)),), torch.float32) for key, pieces in tensors.items()}
    make_file(begun, {STEPS: meta((), torch.float64)} | shapes)
    whole = (
        (key, pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))) for key, pieces in tensors.items()
    )
    fill([begun], chain([(STEPS, torch.tensor(steps, dtype=torch.float64))], whole), tensors)
    os.replace(begun, file)


def stored_steps(folder: Path) -> float:
    """Returns the number of optimiser steps of the state in `folder`. Raises ValueError if this release
    cannot read a state there."""
    with safe_open(_files(folder)[0], framework="pt") as file:
        return float(file.get_tensor(STEPS))


@torch.no_grad()
def read_parts(folder: Path, parts: Iterable[WeightPart], names: Collection[str]) -> None:
    """Reads the ranks' files into `parts`. `names`: the names of all trained weights. Raises ValueError if
    the state belongs to another model."""
    stored: dict[tuple[str, str], list[StoredElements]] = {}
    for file in _files(folder):
        for key, about in tensors_of(file).items():
            if key != STEPS:
                kind, start, name = key.split("/", 2)
                stored.setdefault((kind, name), []).append(
                    StoredElements(int(start), int(start) + about["shape"][0], file, key)
                )
    unlike = sorted(set(names) ^ {name for _, name in stored})
    if unlike:
        raise ValueError(
            f"{folder} holds the state of another model ({unlike[0]} differs): delete it to start the stage"
            " over"
        )
    with ExitStack() as stack:
        opened = {}
        for part in parts:
            for kind, tensor in part.tensors.items():
                whole = torch.empty(tensor.numel(), dtype=torch.float32)
                covered = 0
                for begin, end, file, key in _within(
                    stored[kind, part.name], part.start, part.start + tensor.numel()
                ):
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, framework="pt", backend="pread"))
                    own = int(key.split("/", 2)[1])  # the first element in the file
                    whole[begin - part.start : end - part.start] = opened[file].get_slice(key)[
                        begin - own : end - own
                    ]
                    covered += end - begin
                if covered != tensor.numel():
                    raise ValueError(
                        f"{folder} holds the state of another model ({part.name} has another size): delete it"
                        " to start over"
                    )
                tensor.copy_(whole.view(tensor.shape))
            progress.made()


def _within(stored: Sequence[StoredElements], first: int, end: int) -> list[StoredElements]:
    """Returns the elements from `first` up to but not including `end`, by file."""
    found = [part._replace(first=max(part.first, first), end=min(part.end, end)) for part in stored]
    return [part for part in found if part.first < part.end]


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("rank-*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no state that this release reads: delete the folder to start the stage over"
        )
    return files
