"""The shipped recipes, and the cases of algorithms that the tests run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from rlhf_core import config
from rlhf_core.config import PPO
from rlhf_core.config.rewards import FunctionReward, HttpReward, ModelReward
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.preflight.reward_functions import code_problems
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe
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


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.chdir(ROOT)
    loaded = {}
    for name in ("cases", "measure", "run_all"):
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "algorithms" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, loaded[name])
        spec.loader.exec_module(loaded[name])
    return loaded


def test_every_case_is_a_sound_recipe_that_finds_the_same_sft(modules: dict[str, ModuleType]) -> None:
    cases = modules["cases"].CASES
    plans = {case.algorithm: case.plan() for case in cases}
    # four cases are parts of the demo's run
    assert len(plans) == len(cases) and len({case.name for case in cases}) == len(cases) - 3
    assert len({planned["sft"].digest for planned in plans.values()}) == 1
    for case in cases:
        planned = plans[case.algorithm]
        assert planned.stages_of(case.stage) and planned.recipe.name == case.name
        if case.objective != "answers" and case.objective != "ranking":
            assert modules["measure"]._judged(case, planned) in planned["evaluation"].config.models
            started = planned.stages_of(case.stage)[0].config
            assert "sft" in (
                getattr(started, "policy", None),
                getattr(started, "actor", None),
            ), "the start is the SFT model"


def test_the_estimators_and_losses_are_all_there(modules: dict[str, ModuleType]) -> None:
    stages = [case.plan().stages_of(case.stage)[-1].config for case in modules["cases"].CASES]
    assert {config.advantage_estimator for config in stages if config.stage == "ppo"} == {
        *("gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    }
    assert {config.loss for config in stages if config.stage == "dpo"} == {"sigmoid", "ipo", "simpo", "orpo"}
    assert any(config.stage == "ppo" and config.dynamic_filtering for config in stages)
    assert any(config.stage == "ppo" and config.ratio == "sequence" for config in stages)


@pytest.mark.parametrize(
    ("after", "error", "learned"),
    [(1.31, 0.1, True), (1.29, 0.1, False), (0.5, 0.1, False), (1.0, 0.0, False)],
)
def test_learned_is_a_rise_beyond_three_standard_errors(
    modules: dict[str, ModuleType], after: float, error: float, learned: bool
) -> None:
    measured = modules["measure"].Measured(1.0, after, error, 100, (0.3, 0.4), 12.0)
    assert measured.learned is learned
    case = modules["cases"].CASES[0]
    assert modules["run_all"].table([(case, measured)]).endswith("| yes |" if learned else "| NO |")
    assert modules["run_all"].table([(case, None)]).endswith("| failed |")
