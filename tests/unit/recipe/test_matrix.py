"""Every field of every config class with wrong values: a recipe is refused in sentences that name the place,
or its type allows it.

Cells are generated from the config classes (tests/support/config_cells.py).
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.system.processes import WRONG_INPUT, raised_by_us
from tests.support.config_cells import Cell, Place, cells, places
from tests.support.programs import captured

ROOT = Path(__file__).parents[3]
PLACES = places()
SECONDS = 60.0
PROCESSES = 20


def refusal(recipe: dict[str, Any]) -> str | None:
    """Reads a recipe from its text and plans it, as every command does; returns why it is refused, None when
    it is not."""
    fsspec.filesystem("memory").pipe("/recipe.yaml", _text(recipe).encode())
    started = time.perf_counter()
    try:
        plan(load_recipe("memory://recipe.yaml"))
    except ValueError as error:
        assert raised_by_us(error), f"{type(error).__name__} of a library: {error}"
        return str(error)
    finally:
        assert time.perf_counter() - started < SECONDS
    return None


def _text(recipe: dict[str, Any]) -> str:
    return yaml.dump(recipe, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def named(sentences: str, place: Place, cell: Cell) -> bool:
    """Whether a line starts at the place or around it and names the field, or the record that holds it."""
    start = ".".join(map(str, place.path[:2])) or cell.field
    parts = [cell.field, *(part for part in place.path[2:] if isinstance(part, str))]
    return any(
        line.startswith(start) and any(part in line for part in parts) for line in sentences.splitlines()
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.model.__name__)
def test_every_value_is_allowed_by_its_type_or_refused_at_its_place(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(place.recipe) is None
    accepted = 0
    wrong = []
    for cell in cells(place.model):
        told = refusal(place.having(cell.field, cell.value))
        accepted += told is None
        if told is None and cell.allowed is False:
            wrong.append(f"{place.name}.{cell.field}: {cell.what} is accepted")
        elif told is not None and not named(told, place, cell):
            wrong.append(f"{place.name}.{cell.field}: {cell.what} is refused without its place: {told}")
    assert not wrong, "\n".join(wrong)
    assert accepted, "no value was accepted: the recipe around the field is wrong"
    assert not list(tmp_path.iterdir())


def test_the_matrix_has_every_stage_and_thousands_of_cells() -> None:
    assert sum(1 for place in PLACES for _ in cells(place.model)) > 5000
    assert len(PLACES) > 25


def _sample() -> list[tuple[Place, Cell]]:
    refused = [(place, cell) for place in PLACES for cell in cells(place.model) if cell.allowed is False]
    return random.Random(0).sample(refused, PROCESSES)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "cell"), _sample(), ids=range(PROCESSES))
def test_the_command_refuses(place: Place, cell: Cell, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(_text(place.having(cell.field, cell.value)))
    done = captured(
        [sys.executable, "-P", "-m", "flows.cli", "validate", "recipe.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == WRONG_INPUT, done.stderr
    assert named(done.stderr, place, cell)
    assert "Traceback" not in done.stderr + done.stdout and not done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
