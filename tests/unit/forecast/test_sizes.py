"""The size of a model in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.forecast import zero_stage
from rlhf_core.forecast.zero_stage import size_at
from rlhf_core.hub.model_config import size_of_config

SHAPE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def test_a_folder_that_tells_no_size(tmp_path: Path) -> None:
    assert size_at(str(tmp_path)) is None
    for unknown in (
        "{}",
        "[]",
        json.dumps(SHAPE | {"vocab_size": 9, "intermediate_size": None}),
        json.dumps(SHAPE | {"vocab_size": [9]}),
    ):
        (tmp_path / "config.json").write_text(unknown)
        assert size_at(str(tmp_path)) is None, unknown


def test_a_size_that_cannot_be_had_now_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(place: str) -> Path:
        raise ConnectionError(f"the Hub could not send the files of {place}")

    monkeypatch.setattr(zero_stage, "described", described)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "revision": "abc"})
    )
    assert size_at(str(tmp_path)) is None


def test_an_adapters_size_is_that_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 152064}))
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "base")})
    )
    assert (
        size_at(str(tmp_path / "adapter"))
        == size_at(str(tmp_path / "base"))
        == size_of_config({**SHAPE, "vocab_size": 152064})
    )
