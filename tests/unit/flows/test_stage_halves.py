"""`alignflow stage --rollouts-only` and `--train-only`: what they change of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.cli import run_commands


class Read(Exception):
    """The recipe is read with these overrides."""


@pytest.fixture(autouse=True)
def _only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(recipe: Any, overrides: tuple[str, ...]) -> None:
        raise Read(*overrides)

    monkeypatch.setattr(run_commands, "load_here", load)


def overrides(*given: str, **how: Any) -> tuple[str, ...]:
    with pytest.raises(Read) as found:
        run_commands.stage("ppo", "recipe.yaml", *given, plain=True, **how)
    return found.value.args


def test_a_half_is_an_override_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overrides("seed=1") == ("seed=1",)
    assert overrides("seed=1", rollouts_only=True) == ("seed=1", "ppo.rollouts_only=true")
    folder = tmp_path / "a: run" / "kept_rollouts"
    folder.mkdir(parents=True)
    (folder / "iteration1.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    for given in (Path("a: run"), Path("a: run") / "kept_rollouts", folder):
        assert overrides(train_only=given) == (f'ppo.train_only="{folder}"',)


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"iteration1\.jsonl is missing: give the directory of a run with"):
        run_commands.stage("ppo", "recipe.yaml", train_only=tmp_path)
