"""Fields of environments, agents and verifiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PPO, Data
from rlhf_core.config.data import Source
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.config.rewarding.verifiers import CodeReward, MathReward
from rlhf_core.config.rewards import FunctionReward
from rlhf_core.environments.verifiers.code_verifier import ALL_TESTS
from rlhf_core.environments.verifiers.forked import WAITING
from tests.support.text_rows import rows_of_text

BASE: dict[str, Any] = dict(
    prompts={"sources": "p.jsonl"}, advantage_estimator="grpo", n_samples_per_prompt=2
)


@pytest.mark.parametrize(
    ("fields", "told"),
    rows_of_text("""
    {environment: chess} | 'chess' is not an environment: give a class as path.py:Class, or one of guess, tools
    {environment: {path: guess, options: {day: !!set {1: null}}}} | options must be valid JSON values
    {environment: {path: guess, answer_max_len: 5000}} | answer_max_len=5000 must be at most generate_max_len=1024
    {environment: guess, stream_batch_size: 4} | stream_batch_size scores answers one by one as they finish, but
    {environment: guess, environments: {game: guess}} | environment and environments exclude each other
    {environments: {game: {path: guess, answer_max_len: 5000}}} | environments.game.answer_max_len=5000 must be at most generate_max_len=1024
    {environments: {a/b: guess}} | environments.a/b
    {reward: environment} | reward names the environment, but none is set:
    {one_step_off_policy: true} | one_step_off_policy is called max_staleness
    {max_staleness: 4, sampler_is: 'off'} | max_staleness trains on answers from older weights and needs
    {policy_loss: cispo, dual_clip: 3.0} | cispo weights each token's log-prob: leave out dual_clip
    """),
)
def test_one_sentence_each(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as raised:
        PPO.model_validate(BASE | fields)
    assert told in str(raised.value)


def test_an_environment_gives_the_reward_unless_others_are_named() -> None:
    assert [source.title for source in PPO.model_validate(BASE | {"environment": "guess"}).reward] == [
        "environment"
    ]
    several = PPO.model_validate(BASE | {"environments": {"a": "guess", "b": {"path": "tools"}}})
    assert [source.title for source in several.reward] == ["environment"]
    assert {place: each.path for place, each in several.talks_to.items()} == {
        "environments.a": "guess",
        "environments.b": "tools",
    }
    both = PPO.model_validate(BASE | {"environment": "guess", "reward": ["environment", "rm"]})
    assert [source.title for source in both.reward] == ["environment", "rm"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"agent": "agent --fast"}, "set checker"),
        ({"agent": "a.py:run", "path": "guess"}, "leave path out"),
        ({"path": "agent"}, "set only agent"),
        ({"path": "guess", "checker": "a.py:check"}, "checker applies only to agent and mcp"),
        (
            {"agent": "agent", "checker": "a.py:check", "options": {"a": 1}},
            "command's arguments into the command",
        ),
        ({"agent": "a.py:run", "checker": "check"}, "checker"),
        ({"agent": "it's"}, "neither path.py:function nor a command"),
        ({"agent": "   "}, "neither path.py:function nor a command"),
        ({"agent": "solve.py:run now", "checker": "a.py:check"}, "neither path.py:function nor a command"),
        ({"mcp": "server", "path": "guess"}, "mcp replaces path"),
        ({"path": "mcp_tools"}, "set only mcp"),
        ({"mcp": "server", "agent": "a.py:run"}, "replaces path"),
        ({"mcp": "https://user:secret@host/mcp"}, "token_env"),
        ({"verifiers": "a", "path": "guess"}, "verifiers replaces path"),
        ({"verifiers": "a", "mcp": "server"}, "replaces path"),
        ({"verifiers": "a", "checker": "a.py:check"}, "checker applies only to agent and mcp"),
        ({"path": "verifiers_episodes"}, "set only verifiers"),
        ({"agent": "a.py:run", "python": "python3"}, "python applies only to verifiers"),
        ({"verifiers": ""}, "verifiers"),
        ({"openenv": "host:8000"}, "openenv"),
        ({"openenv": "https://user:secret@host"}, "an address in openenv contains a password"),
        ({"openenv": "http://host", "path": "guess"}, "openenv replaces path"),
        ({"path": "openenv_episodes"}, "set only openenv"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Environment(**fields)


def test_the_functions_are_inputs(tmp_path: Path) -> None:
    config = Environment(agent="agents.py:run", checker="checks.py:check", options={"a": 1})
    assert not config.own and config.title == "agents.py:run"
    assert {name: path.name for name, (path, _) in config.functions.items()} == {
        "agent": "agents.py",
        "checker": "checks.py",
    }
    assert json.loads(json.dumps(config.arguments))["agent"] == f"{Path.cwd()}/agents.py:run"


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
        ({"tasks": {"gcd": {"seed": 1}}}, "set it next to tasks, not inside the task gcd"),
        ({"tasks": {"gcd": {"size": 1}}}, "size applies to the whole source"),
        ({"tasks": {"gcd": {"x": {1}}}}, "must be valid JSON values"),
        ({"tasks": "gcd", "size": 0}, "size"),
        ({"tasks": "gcd", "seed": -1}, "seed"),
        ({"task": "gcd"}, "task"),
        ({"tasks": [{"gcd": {}}]}, "a list holds names of tasks, not {'gcd': {}}"),
        ({"tasks": ["gcd", "lcm", "gcd"]}, "a task is listed twice"),
    ],
)
def test_wrong_generated_questions(given: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        source(given)


def test_a_path_beside_tasks_is_refused() -> None:
    with pytest.raises(ValidationError, match="reasoning_gym replaces path: leave path out"):
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
