"""Checkpoints written weight by weight are those that huggingface_hub writes of weights in memory, byte for
byte."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from rlhf_core.models.checkpoint import checkpoint_weights as weights
from rlhf_core.models.checkpoint.checkpoint_weights import checkpoint_weights, planned_weights
from rlhf_core.models.checkpoint.weight_files import fill, lay_out, meta
from rlhf_core.models.load_model import load_policy
from tests.support.families import make_family

WEIGHTS = {
    "b.weight": torch.arange(24.0).view(4, 6),
    "a.weight": torch.arange(40.0).view(8, 5).bfloat16(),
    "a.bias": torch.tensor(2.5),
    "\u00e9": torch.arange(7),
    "none": torch.empty(0, 3),
    "c": torch.arange(4.0).double(),
}


@pytest.mark.parametrize("shard_bytes", ["5GB", 100])
def test_files_are_those_of_the_hub_library(shard_bytes: int | str, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "hub").mkdir()
    lay_out(
        {name: meta(weight.shape, weight.dtype) for name, weight in WEIGHTS.items()},
        tmp_path / "ours",
        shard_bytes,
    )
    fill((tmp_path / "ours").glob("*.safetensors"), reversed(WEIGHTS.items()), WEIGHTS)
    save_torch_state_dict(WEIGHTS, tmp_path / "hub", max_shard_size=shard_bytes)
    ours, theirs = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("ours", "hub")
    )
    assert ours == theirs and (len(ours) > 2) == (shard_bytes == 100)


def test_weights_without_a_place_and_places_without_weights_are_refused(tmp_path: Path) -> None:
    lay_out({"a": meta((2, 3), torch.float32), "b": meta((1,), "I64")}, tmp_path)
    with pytest.raises(ValueError, match=r"has no place for the weight a of shape \[3, 2\]"):
        fill(tmp_path.glob("*.safetensors"), [("a", torch.zeros(3, 2))], [])
    with pytest.raises(ValueError, match="has no place for the weight c"):
        fill(tmp_path.glob("*.safetensors"), [("c", torch.zeros(1))], [])
    with pytest.raises(ValueError, match=re.escape("the weight b (1 such) was not there")):
        fill(tmp_path.glob("*.safetensors"), [("a", torch.zeros(2, 3))], ["a", "b"])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_groups_of_an_export_are_whole_layers(
    family: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_policy(str(make_family(family, material / "base", tmp_path / "model"))).model
    groups: list[set[str]] = []

    def gathered(parameters: list[Tensor]) -> torch.no_grad:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups.append(
            {
                layer[0]
                for parameter in parameters
                if (layer := re.search(r"layers\.\d+", names[id(parameter)]))
            }
        )
        return torch.no_grad()

    def exported() -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(model, gathered)

    whole = {name: weight.clone() for name, weight in exported()}
    monkeypatch.setattr(weights, "GROUP_BYTES", 1)
    groups.clear()
    assert {name: weight.shape for name, weight in exported()} == {
        name: weight.shape for name, weight in whole.items()
    }
    assert len(groups) > 3 and all(len(layers) <= 1 for layers in groups)
    planned = planned_weights(model)
    assert {name: (weight.shape, weight.dtype) for name, weight in planned.items()} == {
        n: (w.shape, w.dtype) for n, w in whole.items()
    }
