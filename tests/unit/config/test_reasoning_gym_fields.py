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
        ({"tasks": [{"gcd": {}}]}, "a list has names of tasks, not {'gcd': {}}"),
        ({"tasks": ["gcd", "lcm", "gcd"]}, "a task is named twice"),
    ],
)
def test_wrong_generated_questions(given: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        source(given)


def test_a_path_beside_tasks_is_refused() -> None:
    with pytest.raises(ValidationError, match="reasoning_gym stands in place of path: leave path out"):
        source({"tasks": "gcd"}, path="p.jsonl")


def test_equal_digests_mean_equal_rows() -> None:
    """Digests sort keys, and rows take the tasks in turn."""
    one = source({"tasks": {"lcm": {"b": 1, "a": {"d": 2, "c": 3}}, "gcd": {}}}).reasoning_gym
    other = source({"tasks": {"gcd": {}, "lcm": {"a": {"c": 3, "d": 2}, "b": 1}}}).reasoning_gym
    assert one is not None and other is not None
    assert one.model_dump_json() == other.model_dump_json()
    assert list(source({"tasks": ["lcm", "gcd"]}).reasoning_gym.shares) == ["gcd", "lcm"]  # type: ignore[union-attr]


def test_a_source_without_tasks_is_told_of_tasks_alone() -> None:
    with pytest.raises(ValidationError) as told:
        source({})
    assert "tasks" in str(told.value) and "path" not in str(told.value)
