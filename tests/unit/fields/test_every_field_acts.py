"""Another value of each field that decides a result shows in what the stage's code makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fields.change import Change, World, plain, save_models
from tests.unit.fields.ppo_changes import PPO
from tests.unit.fields.training_changes import TRAINING
from tests.unit.recipe.test_deciding_fields import deciding

CHANGES: dict[str, list[Change]] = {"ppo": PPO, **TRAINING}
WITHOUT: dict[str, dict[str, str]] = {}
ALL = [(owner, change) for owner, changes in CHANGES.items() for change in changes]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture
def world(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(models)
    made = World(models, tmp_path, monkeypatch)
    made.rows("eval", [{"prompt": f"Who is {i}?"} for i in range(30)])
    yield made


SEEN: dict[str, Any] = {}  # what probes found with the unchanged fields


@pytest.mark.parametrize(("owner", "change"), ALL, ids=[f"{owner}.{c.field}-{c.probe.__name__}" for owner, c in ALL])
def test_another_value_of_a_field_shows(owner: str, change: Change, world: World) -> None:
    """A probe that finds the same twice finds a difference only where a field makes one."""
    key = f"{change.probe.__module__}.{change.probe.__name__}: {change.beside}"
    if key not in SEEN:
        SEEN[key] = plain(change.probe(world, change.beside))
        assert plain(change.probe(world, change.beside)) == SEEN[key], "the probe itself is not deterministic"
    assert plain(change.probe(world, change.changed)) != SEEN[key]


def test_every_field_that_decides_a_result_has_a_change() -> None:
    missing = {
        owner: sorted(left)
        for owner, fields in deciding().items()
        if (left := set(fields) - {"stage", "kind"} - {change.field for change in CHANGES.get(owner, ())} - set(WITHOUT.get(owner, ())))
    }
    assert not missing
