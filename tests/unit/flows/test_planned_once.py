"""A command reads its recipe once and plans it once; the flow gets the plan, and not the recipe's file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import alignment
from flows.cli import prepare, run_commands
from rlhf_core.config import Recipe
from rlhf_core.recipe import load_recipe, plan
from rlhf_core.recipe.expand import expand
from rlhf_core.recipe.yaml_text import parse

RECIPE = """
name: once
base_model: org/base
stages:
  sft:
    data: {sources: train.jsonl}
"""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts texts of recipes that are parsed, recipes that are validated, and plans."""
    counted: Counter[str] = Counter()
    validated: Callable[..., Recipe] = Recipe.model_validate

    def counting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            counted[what] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(load_recipe, "parse", counting("parsed", parse))
    monkeypatch.setattr(Recipe, "model_validate", counting("validated", validated))
    monkeypatch.setattr(plan, "expand", counting("planned", expand))
    return counted


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "once.yaml").write_text(RECIPE)
    return "recipes/once.yaml"


# with the paths as written, and with the paths resolved against the recipe's folder
ONCE = {"parsed": 1, "validated": 2, "planned": 1}


def test_validate_reads_and_plans_a_recipe_once(recipe: str, counts: Counter[str]) -> None:
    assert prepare.validate(recipe) == 0
    assert counts == ONCE


def test_a_dry_run_reads_and_plans_a_recipe_once(recipe: str, counts: Counter[str]) -> None:
    assert run_commands.run(recipe, dry_run=True) == 0
    assert counts == ONCE


def test_the_flow_of_a_run_gets_the_plan_of_the_command(
    recipe: str, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def keep(planned: plan.Plan, *_: object) -> int:
        flow = alignment.checked_flow("alignment", planned, planned.nodes)
        flow.fn(planned.recipe)  # the flow's function, without Prefect's server
        plans.append(planned)
        return 0

    monkeypatch.setattr(run_commands, "_run", keep)
    monkeypatch.setattr(alignment, "variables", lambda _: {})  # asks a Prefect server for secrets
    monkeypatch.setattr(alignment, "run_all", lambda planned, *_, **__: plans.append(planned))
    assert run_commands.run(recipe) == 0
    assert plans[0] is plans[1]
    assert counts == ONCE
