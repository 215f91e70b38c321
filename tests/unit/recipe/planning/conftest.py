"""The plan of the tests in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.tiny_plan import TEXT, Planned


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(TEXT)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for name in ("train", "pairs", "prompts", "q"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"{name}": 1}}\n')
    return lambda *overrides: plan(load_recipe("recipe.yaml", overrides))
