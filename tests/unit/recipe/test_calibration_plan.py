"""A calibration in a plan: what its digest depends on, and that an evaluation waits for it without being made
again for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config import Regression
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan
from tests.support.labels import label, write_labels

TEXT = """
name: tiny
base_model: org/model
stages:
  reward_model: {model: base, data: {sources: pairs.jsonl}}
  evaluation: {models: [base], baseline: org/other, questions: {path: q.jsonl}, judges: [{kind: reward}]CALIBRATION}
  calibration: {judge: {kind: reward}, labels: labels.jsonl}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_labels(tmp_path / "labels.jsonl", label(1), label(2, uid="q2"))
    return tmp_path


def planned(calibration: str = "", *overrides: str) -> Plan:
    Path("recipe.yaml").write_text(TEXT.replace("CALIBRATION", calibration))
    return plan(load_recipe("recipe.yaml", overrides))


def test_an_evaluation_waits_for_a_calibration_that_decides_nothing_of_it() -> None:
    without = planned()
    waiting = planned(", calibration: calibration")
    assert "calibration" not in without["evaluation"].parents
    assert "calibration" in waiting["evaluation"].parents
    assert [node.name for node in waiting.nodes] == ["reward_model", "calibration", "evaluation"]
    assert without["evaluation"].digest == waiting["evaluation"].digest
    write_labels(Path("labels.jsonl"), label(1, "B>A"))
    later = planned(", calibration: calibration")
    assert later["evaluation"].digest == waiting["evaluation"].digest
    assert later["calibration"].digest != waiting["calibration"].digest


def test_a_calibration_is_made_again_with_its_reward_model() -> None:
    one = planned()
    other = planned("", "reward_model.max_epochs=3")
    assert one["calibration"].parents == ("reward_model",)
    assert one["calibration"].digest != other["calibration"].digest
    assert (
        planned("", "calibration.micro_rollout_batch_size=2")["calibration"].digest
        == one["calibration"].digest
    )


def test_wrong_names_and_kinds_are_told() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"stages\.evaluation\.calibration: unknown stage 'other'.*a stage of kind calibration is needed"
            r" here"
        ),
    ):
        planned(", calibration: other")
    with pytest.raises(
        ValueError,
        match=(
            r"stages\.evaluation\.calibration: reward_model is of kind reward_model, but a stage of kind"
            r" calibration"
        ),
    ):
        planned(", calibration: reward_model")
    with pytest.raises(ValueError, match=r"stages\.calibration\.judge\.reward: unknown name 'missing'"):
        planned("", "calibration.judge.reward=missing")
    with pytest.raises(
        ValueError,
        match=r"stages\.calibration\.judge: kind: unknown value 'rule'; valid: reward, openai, vllm",
    ):
        planned("", "calibration.judge={kind: rule}")
    with pytest.raises(
        ValueError,
        match=(
            r"stages\.calibration\.judge: unknown key 'ties'; did you mean"
            r" tie\?|stages\.calibration\.judge\.ties: "
        ),
    ):
        planned("", "calibration.judge={kind: reward, ties: 1}")


def test_the_calibration_of_another_judge_is_refused() -> None:
    assert planned(", calibration: calibration", "calibration.micro_rollout_batch_size=2")
    told = (
        r"stages\.evaluation\.calibration: calibration calibrates another judge than the first of judges,"
        r" which decides: make them equal"
    )
    with pytest.raises(ValueError, match=told):
        planned(", calibration: calibration", "calibration.judge={kind: reward, tie: 0.5}")


def test_wrong_labels_are_told_before_any_work() -> None:
    write_labels(Path("labels.jsonl"), label(1, "C>A"), label(2))
    node = (found := planned())["calibration"]
    (problem,) = [told for told in check_inputs(found, [node]) if "labels" in told]
    assert problem.startswith("stages.calibration.labels: ") and "line 1: verdict is 'C>A'" in problem


def test_a_regression_suite_judges_the_rounds_of_a_loop_and_the_last_is_final() -> None:
    loop = """
  sft: {data: {sources: train.jsonl}}
  loop: {stage: iterative_dpo, prompts: {sources: prompts.jsonl}, rounds: 2}
  regression: {models: [loop], questions: {path: suite.jsonl}, gates: [{metric: newly_failed/loop, max: 1}, {metric: out_of_band, max: 0}]}
"""
    Path("recipe.yaml").write_text(TEXT.replace("CALIBRATION", "") + loop)
    config = plan(load_recipe("recipe.yaml"))["regression"].config
    assert isinstance(config, Regression)
    assert config.models == ("loop.round1", "loop.round2")
    assert config.parents == {}
    assert [gate.metric for gate in config.gates] == ["newly_failed/loop.round2", "out_of_band"]
    # its rates are an evaluation's
    with pytest.raises(ValueError, match=r"unknown metric 'win_rate/loop\.round2'"):
        plan(load_recipe("recipe.yaml", ["regression.gates=[{metric: win_rate/loop, min: 0.5}]"]))
