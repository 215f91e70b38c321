"""How a recipe names an environment of the package verifiers, and what a check says before any work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.config.data import Source
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.preflight.verifier_problems import verifier_needs
from rlhf_core.recipe import digest
from rlhf_core.recipe.digest import deciding
from rlhf_core.system.files import Digests


def source(given: Any, **fields: Any) -> Source:
    return Data.model_validate({"sources": {"verifiers": given, **fields}}).sources[0]


def test_a_source_is_the_tasks_of_an_environment() -> None:
    found = source({"environment": "wordle", "options": {"a": 1}})
    assert found.path == "verifiers" and found.is_generated
    assert found == Source.model_validate(found.model_dump())
    assert not Source(path="rows.jsonl").is_generated


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "environment"),
        ({"environment": ""}, "environment"),
        ({"environment": "a", "size": 0}, "size"),
        ({"environment": "a", "dataset": "test"}, "dataset"),
        ({"environment": "a", "options": {"x": float("nan")}}, "valid JSON values"),
    ],
)
def test_wrong_fields(given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        source(given)
    with pytest.raises(ValueError, match="verifiers replaces path"):
        source({"environment": "a"}, path="rows.jsonl")


def test_the_arguments_of_the_environment() -> None:
    config = Environment(verifiers="wordle", python="venv/bin/python", options={"a": 1})
    assert config.arguments == {"name": "wordle", "options": {"a": 1}, "python": "venv/bin/python"}
    assert not config.own and config.title == "wordle" and config.file.is_file()


def test_a_missing_package_or_interpreter_is_a_sentence_before_any_work(tmp_path: Path) -> None:
    def needs(**fields: Any) -> list[str]:
        config = PPO(
            prompts={"sources": "rows.jsonl"},
            environment={"verifiers": "no-such-environment", **fields},
            advantage_estimator="grpo",
            n_samples_per_prompt=2,
        )
        return verifier_needs(SimpleNamespace(name="ppo", config=config))  # type: ignore[arg-type]

    (problem,) = needs(python=str(tmp_path / "python"))
    assert problem.startswith("stages.ppo.environment: verifiers: the interpreter ")
    assert problem.endswith("cannot be started (No such file or directory): correct python")
    (problem,) = needs()
    assert "has no package verifiers" in problem or "has no environment 'no-such-environment'" in problem


@pytest.fixture(autouse=True)
def no_release_found_before() -> Iterator[None]:
    digest.found_release.cache_clear()
    yield
    digest.found_release.cache_clear()


def test_a_digest_is_not_made_without_the_release_of_an_installed_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = Environment(verifiers="a", python=str(tmp_path / "none"))
    assert deciding(value, Digests())["release"] == {}
    asked = list[str]()

    def slow(name: str, python: str | None) -> dict[str, str]:
        asked.append(name)
        if len(asked) == 1:
            raise ValueError("its release took more than 60 s")
        return {"code": str(len(asked))}

    monkeypatch.setattr(digest, "verifiers_release", slow)
    with pytest.raises(ValueError, match="took more than 60 s"):
        deciding(value, Digests())
    assert deciding(value, Digests()) == deciding(value, Digests())
    assert asked == ["a", "a"]


def test_a_digest_holds_the_code_and_not_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    release = {"verifiers": "0.4.0", "code": "1"}
    monkeypatch.setattr(digest, "verifiers_release", lambda *_: release)
    for value in (Environment(verifiers="a"), source({"environment": "a"})):
        before = deciding(value, Digests())
        assert "1" in str(before)
        release["code"] = "2"
        digest.found_release.cache_clear()  # as in another process
        assert deciding(value, Digests()) != before
        digest.found_release.cache_clear()
        release["code"] = "1"
    elsewhere = Environment(verifiers="a", python="p")
    assert deciding(Environment(verifiers="a"), Digests()) == deciding(elsewhere, Digests())
    assert "verifiers" not in deciding(Environment(path="guess"), Digests())
