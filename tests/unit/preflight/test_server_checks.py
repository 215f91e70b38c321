"""Checks of the servers that stages send requests to: missing keys, and servers that do not answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import prepare
from flows.cli.prepare import validate
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.preflight import server_checks
from rlhf_core.preflight.machine_checks import check_machine
from rlhf_core.preflight.server_checks import key_warnings, silent_servers
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.system.processes import ENVIRONMENT

RECIPE = """
name: servers
base_model: base
stages:
  sft: {data: {sources: rows.jsonl}}
  preferences: {policy: sft, prompts: {sources: rows.jsonl}, reward: {judge: JUDGE, rubric: right}}
  evaluation: {models: [sft], baseline: base, questions: {path: rows.jsonl}, judges: [JUDGE_OF_GAMES]}
"""
FIRST = """
name: servers
base_model: base
stages:
  preferences: {policy: base, prompts: {sources: rows.jsonl}, reward: "http://host"}
"""
Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "uid": "1"}) + "\n")

    def made(judge: str) -> Plan:
        text = RECIPE.replace("JUDGE_OF_GAMES", judge.replace("{", "{kind: openai, "))
        Path("recipe.yaml").write_text(text.replace("JUDGE", judge))
        return plan(load_recipe("recipe.yaml"))

    return made


def about_keys(planned: Plan) -> list[str]:
    return [problem for problem in check_machine(planned, planned.nodes) if "key" in problem]


def test_a_known_endpoint_without_a_key_is_refused(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    found = planned("{model: m, base_url: 'https://openrouter.ai/api/v1'}")
    of_reward, of_judge = about_keys(found)
    assert of_reward.startswith(
        "stages.preferences: the reward m sends no key to https://openrouter.ai/api/v1, which answers none"
    )
    assert of_judge.startswith("stages.evaluation: the judge m sends no key to https://openrouter.ai/api/v1")
    assert "api_key_env: OPENAI_API_KEY sends it here" in of_reward
    assert key_warnings(found.nodes) == []
    named = planned("{model: m, base_url: 'https://openrouter.ai/api/v1', api_key_env: OPENAI_API_KEY}")
    assert about_keys(named) == key_warnings(named.nodes) == []
    assert about_keys(planned("{model: m}")) == []


def test_an_unknown_endpoint_without_a_key_is_a_note_of_validate(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned("{model: m, base_url: 'https://third.example/v1'}")
    assert about_keys(found) == []
    of_reward, of_judge = key_warnings(found.nodes)
    assert of_reward.startswith(
        "stages.preferences: the reward m sends no key to https://third.example/v1; if it needs one, set"
        " api_key_env"
    )
    assert of_judge.startswith("stages.evaluation: the judge m")
    assert validate("recipe.yaml") == 0
    assert "note: stages.evaluation: the judge m sends no key" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("address", "refuses", "may_refuse"),
    [
        ("https://api.openai.com/v1", True, True),
        ("https://mine.openai.azure.com/openai/v1", True, True),
        ("https://openrouter.ai.third.example/v1", False, True),
        ("https://notopenrouter.ai/v1", False, True),
        ("https://third.example/openrouter.ai", False, True),
        ("https://8.8.8.8/v1", False, True),
        ("https://localhost:8000/v1", False, False),
        ("https://127.0.0.1:8000/v1", False, False),
        ("https://[::1]:8000/v1", False, False),
        ("https://10.0.0.5/v1", False, False),
        ("http://judge:8000/v1", False, False),
    ],
)
def test_which_addresses_need_a_key(address: str, refuses: bool, may_refuse: bool) -> None:
    config = Remote(model="m", base_url=address)
    assert (config.needs_key, config.may_need_key) == (refuses, may_refuse)


def test_a_silent_server_is_a_fault_of_the_first_stages_and_else_a_warning(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage after SFT may find its judge started meanwhile."""
    monkeypatch.setattr(server_checks, "why_unreachable", lambda address: f"no {address[7:]}")
    found = silent_servers(planned("{model: m, base_url: 'http://one/v1'}"))
    assert found.needed == []
    assert found.later == [
        "stages.preferences: the reward m cannot reach http://one/v1 (no one/v1): start its server, or correct"
        " base_url",
        "stages.evaluation: the judge m cannot reach http://one/v1 (no one/v1): start its server, or correct"
        " base_url",
    ]
    Path("recipe.yaml").write_text(FIRST)
    found = silent_servers(plan(load_recipe("recipe.yaml")))
    assert found == (
        [
            "stages.preferences: the reward host cannot reach http://host (no host): start its server, or correct"
            " url"
        ],
        [],
    )
    monkeypatch.setattr(prepare, "check_inputs", lambda *_: [])
    monkeypatch.setattr(prepare, "check_machine", lambda *_: [])
    monkeypatch.setattr(prepare, "load_here", load_recipe)
    assert validate("recipe.yaml", here=True) == ENVIRONMENT
    assert "the reward host cannot reach http://host" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(server_checks, "why_unreachable", lambda _: "")
    assert validate("recipe.yaml", here=True) == 0
    assert "everything that they need is available" in " ".join(capsys.readouterr().out.split())
