"""The recipe of the tests in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_recipe import TEXT, Write


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    def write(text: str = TEXT) -> Path:
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return write
