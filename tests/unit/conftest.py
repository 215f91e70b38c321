"""A fixture of tests of recipes in several folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.tiny_plan import Planned


@pytest.fixture
def planned(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Returns what plans the recipe in TEXT of the test's file, with overrides, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(request.module.TEXT)
    return lambda *overrides: plan(load_recipe("recipe.yaml", overrides))
