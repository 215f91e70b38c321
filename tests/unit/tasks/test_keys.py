"""Keys from Prefect's secrets, with a dictionary as the server: which are read, which source wins, and their
removal."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

import flows.alignment
from rlhf_core.config import Recipe
from rlhf_core.config.gates import chat_servers
from rlhf_core.config.judging.judges import OpenAIJudge
from rlhf_core.config.rewarding.judge_models import RatingModel
from rlhf_core.judging.chat_client import remote
from rlhf_core.recipe.load_recipe import recipe_of
from tasks import keys

VALUE = "hf_FromPrefectAndNowhereElse"


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the server's secrets. Loading another block raises ValueError, as Prefect's `Block.load`."""
    kept: dict[str, str] = {}

    def load(name: str) -> keys.Secret[Any]:
        if name not in kept:
            raise ValueError(f"Unable to find block document named {name} for block type secret")
        return keys.Secret(value=SecretStr(kept[name]))

    monkeypatch.setattr(keys.Secret, "load", staticmethod(load))
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "JUDGE_KEY", "REWARD_KEY"):
        monkeypatch.delenv(name, raising=False)
    return kept


def recipe() -> Recipe:
    judges = [
        {"kind": "rule"},
        {"kind": "openai", "model": "a"},
        {"kind": "openai", "model": "b", "api_key_env": "JUDGE_KEY"},
    ]
    reward = {"url": "http://127.0.0.1:1", "api_key_env": "REWARD_KEY"}
    stages = {
        "ppo": {"prompts": {"sources": "p.jsonl"}, "reward": ["reward_model", reward], "critic": "base"},
        "evaluation": {"models": ["ppo"], "questions": {"path": "q.jsonl"}, "judges": judges},
    }
    return recipe_of({"name": "x", "base_model": "b", "stages": stages})


def test_a_key_that_a_recipe_names_is_required() -> None:
    named = {"kind": "openai", "model": "b", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "JUDGE_KEY"}
    evaluation = {"models": ["base"], "questions": {"path": "q.jsonl"}, "judges": [named]}
    made = recipe_of({"name": "x", "base_model": "b", "stages": {"evaluation": evaluation}})
    assert [key.required for key in made.stages["evaluation"].needed_keys] == [True]


def test_variables_of_a_recipe() -> None:
    assert set(keys.variables(recipe())) == {"HF_TOKEN", "OPENAI_API_KEY", "JUDGE_KEY", "REWARD_KEY"}
    plain = recipe_of({"name": "x", "base_model": "b", "stages": {"sft": {"data": {"sources": "t.jsonl"}}}})
    assert keys.variables(plain) == ("HF_TOKEN",)


@pytest.mark.parametrize(
    ("fields", "variable"),
    [
        ({}, "OPENAI_API_KEY"),
        ({"base_url": "https://eu.api.openai.com/v1"}, "OPENAI_API_KEY"),
        ({"base_url": "https://third.example/v1", "api_key_env": "OPENAI_API_KEY"}, "OPENAI_API_KEY"),
        ({"base_url": "http://127.0.0.1:8000/v1", "api_key_env": "JUDGE_KEY"}, "JUDGE_KEY"),
        ({"base_url": "https://third.example/v1"}, None),
        ({"base_url": "http://third.example/v1"}, None),
        ({"base_url": "http://api.openai.com/v1"}, None),
        ({"base_url": "https://api.openai.com.third.example/v1"}, None),
        ({"base_url": "https://third.example/api.openai.com/v1"}, None),
    ],
)
def test_the_key_of_openai_goes_to_openai_alone(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], variable: str | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of openai")
    monkeypatch.setenv("JUDGE_KEY", "of the judge")
    for config in (RatingModel(model="m", **fields), OpenAIJudge(model="m", **fields)):
        assert config.key_variable == variable
        assert remote(config).key == (os.environ[variable] if variable else "none")
        assert [server.key_variable for server in chat_servers([("m", config)])] == [variable]


def test_a_secret_sets_an_unset_variable_until_the_block_ends(
    blocks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks |= {"hf-token": f" {VALUE}\n", "judge-key": "from Prefect", "reward-key": ""}
    monkeypatch.setenv("JUDGE_KEY", "of the user")
    with pytest.raises(KeyboardInterrupt), keys.provided(keys.variables(recipe())):
        assert (os.environ["HF_TOKEN"], os.environ["JUDGE_KEY"]) == (VALUE, "of the user")
        assert "OPENAI_API_KEY" not in os.environ and "REWARD_KEY" not in os.environ
        raise KeyboardInterrupt
    assert "HF_TOKEN" not in os.environ and os.environ["JUDGE_KEY"] == "of the user"


@pytest.mark.parametrize("flow", ["alignment", "stage"])
def test_a_flow_plans_and_runs_with_the_secrets(
    blocks: dict[str, str], monkeypatch: pytest.MonkeyPatch, flow: str
) -> None:
    blocks["hf-token"] = VALUE
    seen: list[str | None] = []

    def look(*_: object) -> SimpleNamespace:
        seen.append(os.environ.get("HF_TOKEN"))
        return SimpleNamespace(nodes=(), stages_of=lambda name: ())

    for step in ("plan", "run_all"):
        monkeypatch.setattr(flows.alignment, step, look)
    for step in ("fetch_parents", "require_parents"):
        monkeypatch.setattr(flows.alignment, step, lambda *_: None)
    getattr(flows.alignment, flow).fn(recipe(), *(["ppo"] if flow == "stage" else []))
    assert seen == [VALUE, VALUE] and "HF_TOKEN" not in os.environ
