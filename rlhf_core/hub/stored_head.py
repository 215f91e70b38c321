"""Looks for the scalar head of a reward model in safetensors files. Reads only headers and the head's
weights. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HEADS = ("score.weight", "base_model.model.score.weight")  # in a model, in an adapter


def no_reward_head(place: str) -> str:
    """Returns the error message for a model at `place` that is not a reward model."""
    return (
        f"{place} has no trained head for one score (a tensor score.weight of shape [1, hidden size], not all"
        " zeros), so its rewards would mean nothing: name a reward model, as a reward_model stage makes it"
    )


def several_labels(place: str) -> str:
    """Returns the error message for training a reward model or critic from the classifier at `place`."""
    return (
        f"{place} is a classifier of several labels (score.weight has a row for each), and a reward model or"
        " critic has one score: start from a language model or a reward model"
    )


def has_trained_head(folder: Path) -> bool:
    """Returns whether the folder's safetensors have a single-score head with a nonzero weight. Raises OSError
    or ValueError for files that cannot be read."""
    # The last byte of a weight contains the sign bit, which is also set in -0.
    return any(
        len(head) == 1 and bool(head[..., :-1].any() or (head[..., -1] & 0x7F).any())
        for head in _heads(folder)
    )


def has_several_labels(folder: Path) -> bool:
    """Returns whether the folder's safetensors have a head for several labels. Raises the same errors as
    `has_trained_head`."""
    return any(len(head) > 1 for head in _heads(folder))


def _heads(folder: Path) -> Iterator[np.ndarray]:
    """Yields the weights of each head as bytes, (labels, hidden size, bytes per weight)."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError(f"{file} is no safetensors file, or is cut off")
            header: dict[str, dict[str, list[int]]] = json.loads(opened.read(size))
            for name, about in header.items():
                if name in HEADS:
                    start, end = about["data_offsets"]
                    opened.seek(8 + size + start)
                    if len(stored := opened.read(end - start)) < end - start:
                        raise ValueError(f"{file} is cut off")
                    yield np.frombuffer(stored, np.uint8).reshape(*about["shape"], -1)
