"""Sizes of models, and what sharding makes of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_core.config import SFT, Optimised
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.sharding import TORCH, Training
from rlhf_core.forecast import zero_stage
from rlhf_core.forecast.by_phase import training_by_phase
from rlhf_core.forecast.zero_stage import size_at
from rlhf_core.hub.model_config import size_of_config
from tests.support.measured import H200, LARGE_MODEL, SMALL_MODEL

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


ROOT = Path(__file__).parents[3]
# the field with its checks; ZeRO's formulas and engine; and what turns other trainers' flags into recipes
MAY_COMPARE = (
    "rlhf_core/config/training/optimised.py",
    "rlhf_core/config/training/zero_sharding.py",
    "rlhf_core/training/zero/",
    "rlhf_core/migrate/",
)


def comparisons(source: str) -> Iterator[str]:
    """Yields the comparisons of a ZeRO stage in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            compared = [ast.unparse(part) for part in (node.left, *node.comparators)]
            if any("zero_stage" in part or "sharding.stage" in part for part in compared):
                yield ast.unparse(node)


def test_zero_stages_are_compared_only_where_zero_is() -> None:
    planted = (
        "config.zero_stage == 3 or how.sharding.stage < 2 or kept['zero_stage'] in (0, 'auto') or a == 3"
    )
    assert len(list(comparisons(planted))) == 3
    files = [
        file
        for package in ("flows", "tasks", "evaluation", "rlhf_core")
        for file in (ROOT / package).rglob("*.py")
    ]
    found = {
        place: told
        for file in files
        if not (place := str(file.relative_to(ROOT))).startswith(MAY_COMPARE)
        and (told := list(comparisons(file.read_text())))
    }
    assert found == {}, "ask the stage's Sharding, such as config.sharding.weights"


def test_each_value_of_zero_stage_has_a_record() -> None:
    assert get_args(Optimised.model_fields["zero_stage"].annotation) == ("auto", *SHARDINGS)
    assert all(each.stage == stage for stage, each in SHARDINGS.items())
    shares = [(each.state, each.gradients, each.weights) for each in SHARDINGS.values()]
    assert shares == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]


@pytest.mark.parametrize("sums", [False, True])
def test_more_ranks_take_less_of_what_is_sharded_alone(sums: bool) -> None:
    """Bytes a parameter of state and gradients on one rank and on eight."""
    count = SMALL_MODEL.parameters
    for stage, sharding in SHARDINGS.items():
        one, eight = (
            sharding.on_gpu(Training(ranks, sharding, 0.0, 8192, sums_in_fp32=sums), count, 0.0)
            for ranks in (1, 8)
        )
        assert eight.state == (one.state / 8 if sharding.state else one.state), stage
        assert (eight.gradients < one.gradients) is sharding.state, stage
        assert (one.step > 0) is (sharding is TORCH), stage


def test_plain_torch_has_no_optimiser_in_host_memory() -> None:
    """A stage resumes in plain torch from such a state, also when the recipe now sets `adam_offload`."""

    def on_host(stage: int, **fields: Any) -> float:
        config = SFT.model_validate({"data": {"sources": "d.jsonl"}, "ranks": {"gpus": 1}} | fields)
        return training_by_phase(config, LARGE_MODEL, stage, H200)["step"].host

    assert on_host(0, adam_offload=True) == on_host(0)
    assert on_host(2, adam_offload=True) > on_host(2) + 16 * LARGE_MODEL.parameters
