"""What each value of `zero_stage` shards, and that code asks its record instead of comparing the number."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from rlhf_core.config import SFT, Optimised
from rlhf_core.config.training.optimised import SHARDINGS
from rlhf_core.config.training.sharding import TORCH, Training
from rlhf_core.forecast.by_phase import training_by_phase
from tests.support.measured import H200, LARGE_MODEL, SMALL_MODEL

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
