"""Another value of each field that decides a result shows in what the stage's code makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fields.change import Change, World, plain, save_models
from tests.unit.fields.loop_changes import ROUNDS_OF_LOOPS
from tests.unit.fields.ppo_changes import CURRICULUM, PPO
from tests.unit.fields.sampled_changes import SAMPLED
from tests.unit.fields.training_changes import TRAINING
from tests.unit.fields.without import WITHOUT
from tests.unit.recipe.test_deciding_fields import deciding

CHANGES: dict[str, list[Change]] = {
    "ppo": PPO,
    "Curriculum": CURRICULUM,
    **TRAINING,
    **SAMPLED,
    **ROUNDS_OF_LOOPS,
}
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


SEEN: dict[tuple[Any, str], Any] = {}  # what probes found with the unchanged fields


@pytest.mark.parametrize(
    ("owner", "change"), ALL, ids=[f"{owner}.{c.field}-{c.probe.__name__}" for owner, c in ALL]
)
def test_another_value_of_a_field_shows(owner: str, change: Change, world: World) -> None:
    """A probe that finds the same twice finds a difference only where a field makes one."""
    key = change.probe, str(change.beside)
    if key not in SEEN:
        SEEN[key] = plain(change.probe(world, change.beside))
        assert plain(change.probe(world, change.beside)) == SEEN[key], "the probe itself is not deterministic"
    assert plain(change.probe(world, change.changed)) != SEEN[key]


def test_every_field_that_decides_a_result_has_a_change() -> None:
    missing = {}
    for owner, names in deciding().items():
        changed = {change.field for change in CHANGES.get(owner, ())}
        missing[owner] = sorted(
            set(names) - {"stage", "kind"} - changed - set(WITHOUT.get(owner, "").split())
        )
    missing = {owner: names for owner, names in missing.items() if names}
    assert not missing, "add a change of each to its table"


def test_the_list_of_fields_without_a_change_is_not_too_long() -> None:
    known = deciding()
    probed = {owner: {change.field for change in changes} for owner, changes in CHANGES.items()}
    surplus = {
        owner: [f for f in names.split() if f not in known[owner] or f in probed.get(owner, ())]
        for owner, names in WITHOUT.items()
    }
    assert not any(surplus.values()), surplus
