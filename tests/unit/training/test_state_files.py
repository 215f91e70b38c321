"""A training state is read by name and element, however many ranks have written it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.training.state_files import KINDS, WeightPart, by_key, read_parts, stored_steps, write_tensors

WEIGHTS = {"a.weight": torch.arange(35.0).view(5, 7), "b": torch.arange(3.0)}


def parts(ranks: int, rank: int, filled: bool) -> Iterator[WeightPart]:
    """This rank's parts as ZeRO-3 cuts them, with the values of WEIGHTS (the moments 100 and 200 more), or
    zeros."""
    for name, weight in WEIGHTS.items():
        share = -(-weight.numel() // ranks)
        own = weight.flatten()[rank * share : (rank + 1) * share]
        yield WeightPart(
            name,
            rank * share,
            {kind: own + 100 * i if filled else torch.zeros_like(own) for i, kind in enumerate(KINDS)},
        )


def write(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        write_tensors(
            folder,
            rank,
            7,
            {key: [tensor] for key, tensor in by_key(parts(ranks, rank, filled=True)).items()},
        )


@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (4, 3), (4, 1), (1, 4), (3, 5)])
def test_other_ranks_read_their_elements(writers: int, readers: int, tmp_path: Path) -> None:
    write(tmp_path, writers)
    assert stored_steps(tmp_path) == 7
    for rank in range(readers):
        found = list(parts(readers, rank, filled=False))
        expected = list(parts(readers, rank, filled=True))
        read_parts(tmp_path, found, WEIGHTS)
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(one.tensors[kind], other.tensors[kind]) for kind in KINDS)


def test_a_whole_weight_is_read_in_its_shape(tmp_path: Path) -> None:
    write(tmp_path, 4)
    whole: dict[str, Tensor] = {kind: torch.zeros(5, 7) for kind in KINDS}
    read_parts(tmp_path, [WeightPart("a.weight", 0, whole)], WEIGHTS)
    assert torch.equal(whole["exp_avg"], WEIGHTS["a.weight"] + 100)


def test_states_of_other_models_and_of_older_releases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no state that this release reads"):
        stored_steps(tmp_path)
    write(tmp_path, 2)
    with pytest.raises(ValueError, match=r"another model \(c differs\)"):
        read_parts(tmp_path, [], [*WEIGHTS, "c"])
    with pytest.raises(ValueError, match=r"another model \(b has another size\)"):
        read_parts(tmp_path, [WeightPart("b", 0, {"weight": torch.zeros(4)})], WEIGHTS)
    (tmp_path / "rank-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="has another size"):
        read_parts(tmp_path, parts(1, 0, filled=False), WEIGHTS)
