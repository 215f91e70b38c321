"""The recipes that are shipped: each validates, finds the functions it names, and shares the demo's first
stages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rlhf_core.config import PPO
from rlhf_core.config.rewards import FunctionReward, HttpReward, ModelReward
from rlhf_core.preflight.reward_functions import code_problems
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe
from rlhf_core.recipe.plan import plan

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "deployments" / "recipes").glob("*.yaml"))
ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "reinforce-pp": "reinforce_pp_baseline", "rewards": "gae"}


def ppo_of(name: str) -> PPO:
    recipe = load_recipe(ROOT / "deployments" / "recipes" / f"{name}.yaml")
    return next(config for config in recipe.stages.values() if isinstance(config, PPO))


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_a_shipped_recipe_is_sound(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(path, [f"artifacts={tmp_path}"])
    planned = plan(recipe)
    assert recipe.name == path.stem
    assert [problem for node in planned.nodes for problem in code_problems(node)] == []
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_demos_sft_and_reward_model_are_found_done(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    demo, other = (
        plan(load_recipe(f"deployments/recipes/{recipe}.yaml", [f"artifacts={tmp_path}"]))
        for recipe in ("tiny-cpu", name)
    )
    assert [other[stage].run_dir for stage in ("sft", "reward_model")] == [
        demo[stage].run_dir for stage in ("sft", "reward_model")
    ]
    assert ppo_of(name).advantage_estimator == ESTIMATORS[name]


def test_the_recipe_of_several_rewards_has_one_of_each_kind() -> None:
    assert [type(source) for source in ppo_of("rewards").reward] == [ModelReward, FunctionReward, HttpReward]
    assert [source.title for source in ppo_of("rewards").reward] == ["reward_model", "bare", "server"]


def test_the_demos_reward_function() -> None:
    spec = importlib.util.spec_from_file_location("checks", ROOT / "deployments" / "recipes" / "checks.py")
    assert spec is not None and spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    assert checks.bare(["123", " 7\n", "It is 5", "", "12"], [True, True, True, True, False]) == [
        1,
        1,
        0,
        0,
        0,
    ]
