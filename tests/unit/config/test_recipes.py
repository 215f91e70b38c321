"""Shipped recipes: each is valid, fits the demo's material, and shares its first stages with the demo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core import config
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.loops.loop_choice import loop_of, with_rounds
from rlhf_core.recipe.plan import plan
from tests.support.demo_recipe import demo_recipe

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
FAMILY = ("dpo", "ipo", "simpo", "orpo", "kto", "iterative-kto", "rejection-sampling", "conditional-sft")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_named_like_its_file(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem and plan(recipe).nodes


def test_the_demos_loop_can_be_scheduled_which_begins_with_one_round() -> None:
    recipe = load_recipe(ROOT / "deployments" / "recipes" / "tiny-cpu.yaml")
    for rounds in (1, 3):
        assert plan(with_rounds(recipe, loop_of(recipe), rounds))["evaluation"].config.gates


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_the_family_fits_the_demos_material(
    name: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fixture's material has a twentieth of the prompts; their number is not tested.
    place = tmp_path / "demo" / "material"
    place.mkdir(parents=True)
    for file in material.iterdir():
        (place / file.name).symlink_to(file)
    (place / "prompts.jsonl").unlink()
    (place / "prompts.jsonl").write_text((material / "prompts.jsonl").read_text() * 20)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checks.py").write_text((ROOT / "deployments" / "recipes" / "checks.py").read_text())
    recipe, demo = (load_recipe(demo_recipe(tmp_path, stem, f"{stem}.yaml")) for stem in (name, "tiny-cpu"))
    assert recipe.artifacts == demo.artifacts
    planned = plan(recipe)
    of_demo = plan(demo)
    assert check_inputs(planned, planned.nodes) == []
    for stage in {"sft", "reward_model"} & recipe.stages.keys():
        assert planned[stage].run_dir == of_demo[stage].run_dir, f"the demo's {stage} is found again"
    assert "sft" in recipe.stages


def test_the_table_of_algorithms_names_what_there_is() -> None:
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    assert (
        set(re.findall(r"`([a-z-]+)\.yaml`", text))
        == {recipe.stem for recipe in RECIPES}
        >= {*FAMILY, "tiny-cpu"}
    )
    for kind in ("IterativeDPO", "Iterative"):
        for post_processor in get_args(getattr(config, kind).model_fields["post_processor"].annotation):
            assert f"`post_processor: {post_processor}`" in text
    for loss in get_args(config.DPO.model_fields["loss"].annotation):
        assert f"`loss: {loss}`" in text or f"`{loss}`" in text
