"""`make algorithms`: its cases are sound recipes that share the demo's SFT, and its verdict is not for
nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


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
