"""Large weights are read into memory that is used again, and not read by ranks that get their data when they
are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_core.models.weights import weight_reader
from rlhf_core.models.weights.shards import require_data
from rlhf_core.models.weights.weight_reader import Buffers, WeightFile, head_of_its_own

WEIGHTS = {
    "large": torch.arange(60.0).reshape(6, 10),
    "half": torch.arange(48.0).reshape(4, 12).bfloat16(),
    "small": torch.arange(5.0),
    "whole": torch.arange(40),
}


def opened(
    folder: Path, reads: bool, monkeypatch: pytest.MonkeyPatch, buffers: Buffers | None = None
) -> WeightFile:
    monkeypatch.setattr(weight_reader, "LARGE", 40)
    file = folder / "model.safetensors"
    save_file(WEIGHTS, file, {"format": "pt"})
    return WeightFile(
        safe_open(file, framework="pt", backend="pread"), str(file), reads, buffers or Buffers()
    )


def test_a_rank_that_reads_gets_what_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path, True, monkeypatch)
    assert sorted(file.keys()) == sorted(WEIGHTS)
    for name, expected in WEIGHTS.items():
        found = file.get_slice(name)
        assert torch.equal(found[...], expected) and found[...].dtype == expected.dtype
        assert found.get_shape() == [*expected.shape] and torch.equal(found[1:3], expected[1:3])
    file.__exit__(None, None, None)
    with pytest.raises((OSError, ValueError)):
        file.get_slice("large")[...]


def test_other_ranks_read_small_weights_alone_and_a_weight_without_data_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(tmp_path, False, monkeypatch)
    read: dict[str, Tensor] = {name: file.get_slice(name)[...] for name in WEIGHTS}
    assert torch.equal(read["small"], WEIGHTS["small"]) and torch.equal(read["whole"], WEIGHTS["whole"])
    for name in ("large", "half"):
        assert read[name].shape == WEIGHTS[name].shape
        assert read[name].isnan().all()
        assert read[name].untyped_storage().nbytes() <= 4
        assert torch.equal(file.get_slice(name)[2:], WEIGHTS[name][2:]), "a part is read"

    class Reading:
        reads = False

    model = nn.Linear(10, 6)
    require_data(model, Reading())  # type: ignore[arg-type]
    model.weight.data = read["large"]
    with pytest.raises(RuntimeError, match=r"^weight was not cut over the .* so this rank has no data of it"):
        require_data(model, Reading())  # type: ignore[arg-type]
    require_data(model, None)


@pytest.mark.parametrize("stored", ["one", "equal", "other values", "other rows", "no embedding"])
def test_a_head_of_its_own_is_found(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "PIECE", 64)
    embedding = torch.arange(60.0).reshape(6, 10)
    head = {"one": None, "other values": embedding.clone(), "other rows": embedding[:5].clone()}.get(
        stored, embedding.clone()
    )
    if stored == "other values":
        head[5, 9] = 0
    weights = {"model.embed_tokens.weight": embedding} | ({} if head is None else {"lm_head.weight": head})
    if stored == "no embedding":
        del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert head_of_its_own(tmp_path) == stored.startswith("other")


def test_a_file_can_be_opened_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, False, monkeypatch) as file:
        assert file.metadata() == {"format": "pt"} and torch.equal(file.get_tensor("large"), WEIGHTS["large"])


def test_few_parts_are_kept_when_many_were_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = Buffers()
    file = opened(tmp_path, True, monkeypatch, buffers)
    several = [file.get_slice("large")[...] for _ in range(9)]
    assert len(buffers._kept) == 9 and all(torch.equal(each, WEIGHTS["large"]) for each in several)
    del several[1:]
    file.get_slice("half")[...]
    assert len(buffers._kept) == 4, "the one in use, the one that is taken, and two more"
    assert torch.equal(several[0], WEIGHTS["large"])


def test_memory_is_used_again_when_no_weight_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    empty = np.empty
    monkeypatch.setattr(
        weight_reader.np, "empty", lambda size, dtype: made.append(size) or empty(size, dtype)
    )
    file = opened(tmp_path, True, monkeypatch)
    first = file.get_slice("large")[...]
    second = file.get_slice("large")[...]
    assert made == [240, 240] and torch.equal(first, second), "both are there"
    second += 1
    assert torch.equal(first, WEIGHTS["large"])
    del first, second
    for _ in range(3):
        assert torch.equal(file.get_slice("half")[...], WEIGHTS["half"])
        assert torch.equal(file.get_slice("large")[...], WEIGHTS["large"])
    assert made == [240, 240]
