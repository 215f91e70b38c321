"""How a recipe names generated questions."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import Data
from rlhf_core.config.data import Source


def source(given: Any, **fields: Any) -> Source:
    return Data.model_validate({"sources": {"reasoning_gym": given, **fields}}).sources[0]


@pytest.mark.parametrize("tasks", ["gcd", ["gcd"], {"gcd": {}}, {"gcd": None}])
def test_tasks_are_named_in_short_or_with_their_options(tasks: Any) -> None:
    found = source({"tasks": tasks})
    assert found == source({"tasks": {"gcd": {}}}) == Source.model_validate(found.model_dump())
    assert found.path == "reasoning_gym" and found.reasoning_gym is not None
    assert found.reasoning_gym.shares == {"gcd": 1.0} and found.reasoning_gym.options == {"gcd": {}}


def test_weights_are_relative_and_no_options() -> None:
    found = source({"tasks": {"gcd": {"weight": 3, "min_numbers": 2}, "lcm": {}}}).reasoning_gym
    assert found is not None
    assert found.shares == {"gcd": 0.75, "lcm": 0.25}
    assert found.options == {"gcd": {"min_numbers": 2}, "lcm": {}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tasks": {}}, "tasks"),
        ({"tasks": {"gcd": {"weight": 0}}}, "weight of the task gcd must be a number above 0, not 0"),
        ({"tasks": {"gcd": {"weight": "a"}}}, "a number above 0, not 'a'"),
        ({"tasks": {"gcd": {"weight": float("nan")}}}, "a number above 0, not nan"),
        ({"tasks": {"gcd": {"weight": True}}}, "a number above 0, not True"),
        ({"tasks": {"gcd": {"seed": 1}}}, "set it beside tasks, not in the task gcd"),
        ({"tasks": {"gcd": {"size": 1}}}, "size is that of the whole source"),
        ({"tasks": {"gcd": {"x": {1}}}}, "must be what JSON can hold"),
        ({"tasks": "gcd", "size": 0}, "size"),
        ({"tasks": "gcd", "seed": -1}, "seed"),
        ({"task": "gcd"}, "task"),
    ],
)
def test_wrong_generated_questions(given: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        source(given)


def test_a_path_beside_tasks_is_refused() -> None:
    with pytest.raises(ValidationError, match="reasoning_gym stands in place of path: leave path out"):
        source({"tasks": "gcd"}, path="p.jsonl")
