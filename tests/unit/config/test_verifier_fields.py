"""How a recipe names verifiers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PPO, Data
from rlhf_core.config.rewarding.verifiers import CodeReward, MathReward
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.environments.verifiers.code_verifier import ALL_TESTS
from rlhf_core.environments.verifiers.forked import WAITING


def rewards_of(reward: Any, **fields: Any) -> Any:
    return PPO(prompts=Data(sources="none"), critic="sft", reward=reward, **fields).reward


@pytest.mark.parametrize(
    "reward", ["math", {"verifier": "math"}, {"kind": "math"}, {"verifier": "math", "answer": "answer"}]
)
def test_a_verifier_is_named_in_short_or_by_its_field(reward: Any) -> None:
    assert rewards_of(reward) == (MathReward(),)


def test_code_is_a_verifier_too() -> None:
    assert rewards_of("code") == (CodeReward(),) == rewards_of({"verifier": "code", "language": "python"})


def test_a_verifier_is_one_of_several_sources() -> None:
    found = rewards_of(["a.py:f", {"verifier": "math", "answer": "solution", "weight": 2, "name": "right"}])
    assert found == (FunctionReward(function="a.py:f"), MathReward(answer="solution", weight=2, name="right"))
    assert [source.title for source in found] == ["f", "right"]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"verifier": "maths"}, "maths"),
        ({"verifier": "math", "answer": ""}, "answer"),
        ({"verifier": "math", "url": "http://host"}, "url"),
        ({"verifier": "math", "timeout": 0}, "timeout"),
        ({"verifier": "code", "language": "perl"}, "language"),
        ({"verifier": "code", "memory_mib": 0}, "memory_mib"),
        ({"verifier": "code", "answer": "a"}, "answer"),
        (["math", {"verifier": "math"}], "two reward sources are called 'math'"),
    ],
)
def test_wrong_verifiers(reward: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        rewards_of(reward)


def test_a_request_has_time_for_all_its_answers() -> None:
    numbers = MathReward(timeout=10)
    assert numbers.request_seconds > numbers.batch_size * WAITING * numbers.timeout
    programs = CodeReward(timeout=10)
    assert programs.request_seconds > programs.batch_size * ALL_TESTS * programs.timeout
