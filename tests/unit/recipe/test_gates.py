"""Gates: their configuration, what they are checked against, what a failed one says, and that they decide no
digest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from evaluation.report.run_page import write_report
from evaluation.report.summary import StageView
from flows.cli.dry_run import outlook
from rlhf_core.config import KINDS, Recipe, StageConfig
from rlhf_core.config.gates import Verdict
from rlhf_core.config.kinds import has_metric, metrics_of
from rlhf_core.recipe.gate_checks import (
    GateFailed,
    check,
    gates_of,
    holding,
    meaning_of,
    reset_reference_notes,
)
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe, recipe_of
from rlhf_core.recipe.plan import plan
from rlhf_core.records import StageResult
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.text_rows import rows_of_text
from tests.support.tiny_plan import Planned

TEXT = """
name: tiny
base_model: base/model
stages:
  sft: {data: {sources: train.jsonl}, eval_data: {sources: held.jsonl}}
  reward_model: {data: {sources: pairs.jsonl}, eval_data: {sources: held-pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}}
  loop: {stage: iterative, policy: sft, post_processor: kto, prompts: {sources: prompts.jsonl}, rounds: 2}
  evaluation: {models: [ppo, loop], questions: {path: q.jsonl}}
"""


def result_of(metrics: dict[str, float], kind: str = "sft") -> StageResult:
    return StageResult(
        name=kind, stage=kind, digest="0", seconds=1, metrics=metrics, outputs={}, files={}, environment={}
    )


def verdicts(metrics: dict[str, float], **gate: object) -> tuple[Verdict, ...]:
    recipe = recipe_of(
        {"name": "x", "base_model": "b", "stages": {"sft": {"data": {"sources": "t.jsonl"}, "gates": [gate]}}}
    )
    return check("sft", recipe.stages["sft"], result_of(metrics))


def test_gates_change_no_digest(planned: Planned) -> None:
    before = planned()
    after = planned(
        "sft.gates=[{metric: eval/loss, max: 2.0}]",
        "loop.gates=[{metric: accuracy, min: 0.6}, {metric: answers, min: 10, on_fail: warn}]",
        "evaluation.gates=[{metric: win_rate/loop.round2, min: 0.5}]",
    )
    assert [node.digest for node in after.nodes] == [node.digest for node in before.nodes]
    assert after["sft"].config.gates and not before["sft"].config.gates
    assert load_recipe_again(after.recipe) == after.recipe


def load_recipe_again(recipe: Recipe) -> Recipe:
    Path("again.yaml").write_text(dump_recipe(recipe))
    return load_recipe("again.yaml")


def test_a_loops_gates_go_to_the_stage_that_has_the_metric(planned: Planned) -> None:
    found = planned(
        "loop.gates=[{metric: kl, max: 3}, {metric: response/truncated, max: 0.1}, {metric: data/kept,"
        " min: 5}]"
    )
    gated = {
        node.name: [gate.metric for gate in node.config.gates] for node in found.nodes if node.config.gates
    }
    each = {"preferences": ["response/truncated"], "kto": ["kl", "data/kept"]}
    assert gated == {f"loop.round{k}.{stage}": metrics for k in (1, 2) for stage, metrics in each.items()}


def test_a_gate_that_names_a_loop_speaks_of_its_last_round(planned: Planned) -> None:
    for rounds in (1, 2, 3):
        found = planned("evaluation.gates=[{metric: win_rate/loop, min: 0.5}]", f"loop.rounds={rounds}")
        assert [gate.metric for gate in found["evaluation"].config.gates] == [f"win_rate/loop.round{rounds}"]


@pytest.mark.parametrize(
    ("override", "told"),
    rows_of_text(r"""
    sft.gates=[{metric: eval/los, max: 2}] | ^stages\.sft\.gates\.0\.metric: unknown metric 'eval/los'; did you mean eval/loss
    reward_model.gates=[{metric: win_rate/ppo, min: 0.5}] | stages\.reward_model\.gates\.0\.metric: unknown metric 'win_rate/ppo'
    evaluation.gates=[{metric: win_rate/loop.round3, min: 0.5}] | evaluation\.gates\.0\.metric.*win_rate/loop\.round2
    loop.gates=[{metric: accuracyy, min: 0.5}] | ^stages\.loop\.gates\.0\.metric: unknown metric 'accuracyy'; did you mean accuracy
    loop.gates=[{metric: eval/loss, min: 0.5}] | stages\.loop\.gates\.0.*there is no eval_data
    sft.gates=[{metric: loss}] | stages\.sft\.gates\.0: a gate on loss needs a bound: set min, max or both
    sft.gates=[{metric: loss, min: 3, max: 2}] | stages\.sft\.gates\.0: min=3 is above max=2
    sft.gates=[{metric: loss, min: .nan}] | stages\.sft\.gates\.0: the gate on loss has a bound that is not a finite number
    sft.gates=[{metric: loss, max: 2, on_fail: halt}] | stages\.sft\.gates\.0\.on_fail: .*'stop', 'warn' or 'branch'
    sft.gates=[{metric: loss, maximum: 2}] | stages\.sft\.gates\.0\.maximum: unknown key 'maximum'; did you mean m
    """),
)
def test_wrong_gates_are_one_sentence(planned: Planned, override: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        planned(override)
    assert "\n" not in str(refused.value)


def test_held_out_metrics_need_held_out_data(planned: Planned) -> None:
    gate = "sft.gates=[{metric: eval/loss, max: 2}]"
    assert planned(gate)["sft"].config.gates
    with pytest.raises(ValueError, match=r"stages\.sft\.gates\.0.*there is .* eval/\.\.\. is measured on it"):
        planned(gate, "sft.eval_data=null")


def test_bounds() -> None:
    assert [verdicts({"loss": value}, metric="loss", max=2.0)[0].passed for value in (1.9, 2.0, 2.1)] == [
        True,
        True,
        False,
    ]
    assert [
        verdicts({"loss": value}, metric="loss", min=1, max=2)[0].passed for value in (0.9, 1.0, 2.1)
    ] == [False, True, False]


@pytest.mark.parametrize("metrics", [{}, {"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}])
def test_a_missing_or_strange_value_does_not_pass(metrics: dict[str, float]) -> None:
    (verdict,) = verdicts(metrics, metric="loss", max=2.0)
    assert not verdict.passed and holding([verdict]) == [verdict]
    assert ("its result has no metric loss" in verdict.summary) == (not metrics)


def test_what_a_failed_gate_says() -> None:
    (verdict,) = verdicts({"eval/loss": 3.25}, metric="eval/loss", max=2.0)
    assert verdict.summary == "stage sft: eval/loss is 3.25, and the gate requires at most 2"
    assert str(GateFailed([verdict])).startswith(
        f"{verdict.summary}: what depends on it was not started. The SFT is bad, and all later stages start from this model. "
    )
    assert "\n" not in str(GateFailed([verdict]))
    assert not holding(verdicts({"loss": 3.0}, metric="loss", max=2.0, on_fail="warn"))


def test_meanings_name_the_stage_that_is_bad() -> None:
    assert "reward model is bad" in meaning_of("reward_model", "eval/accuracy")
    assert "PPO's steps are so large that" in meaning_of("ppo", "policy/clip_share")
    assert (
        meaning_of("evaluation", "win_rate_vs_parent/ppo") == meaning_of("evaluation", "win_rate/ppo") != ""
    )
    assert "judge" in meaning_of("evaluation", "judge_agreement/rule")
    assert "alignflow data" in meaning_of("dpo", "data/dropped") and meaning_of("publication", "files") == ""


def test_every_meaning_belongs_to_a_metric_that_exists(planned: Planned) -> None:
    questions = {"path": "q.jsonl"}
    judges = [{"kind": "rule"}, {"kind": "openai", "model": "judge"}]
    more: dict[str, object] = {
        "dpo": {"data": {"sources": "p.jsonl"}, "eval_data": {"sources": "p.jsonl"}},
        "pairs": {"stage": "preferences", "prompts": {"sources": "p.jsonl"}},
        "judged": {
            "stage": "evaluation",
            "models": ["ppo", "dpo"],
            "questions": questions,
            "judges": judges,
            "reward_evaluation": {"data": {"sources": "p.jsonl"}},
            "temperature": 1,
        },
        "alignment_tax": {"models": ["ppo"], "tasks": ["gsm8k"]},
        "regression": {"models": ["ppo"], "questions": questions},
        "calibration": {"judge": {"kind": "reward"}, "labels": "l.jsonl"},
        "drift": {
            "model": "ppo",
            "evaluation": "judged",
            "prompts": {"sources": "p.jsonl"},
            "past_prompts": {"sources": "q.jsonl"},
            "kl": True,
            "anchors": {"pairs": questions, "judge": {"kind": "rule"}},
        },
        "kto": {"data": {"sources": "p.jsonl"}, "eval_data": {"sources": "p.jsonl"}},
        "rl": {
            "stage": "ppo",
            "prompts": {"sources": "p.jsonl"},
            "eval_prompts": {"sources": "q.jsonl"},
            "sampler_is": "mask",
        },
        "select": {"of": ["dpo", "ppo"], "by": "judged"},
        "publication": {"model": "sft"},
    }
    recipe = planned().recipe.model_dump()
    recipe["stages"] |= more
    known: dict[str, list[str]] = {}
    for node in plan(recipe_of(recipe)).nodes:
        config: StageConfig = node.config
        known.setdefault(config.stage, []).extend(metrics_of(config))
    assert set(known) == {name for name, kind in KINDS.items() if kind.module}
    for kind, names in known.items():
        metrics = KINDS[kind].metrics
        assert [name for name in names if not any(metric.has(name) for metric in metrics)] == [], kind


def test_a_finished_stage_is_checked_again_and_its_verdicts_are_kept(
    planned: Planned, tmp_path: Path
) -> None:
    strict = planned("sft.gates=[{metric: loss, max: 1.0}, {metric: steps, min: 1}]")
    node = strict["sft"]
    assert gates_of(node) == ()
    run = RunDir(node.run_dir)
    run.prepare(strict.request(node))
    run.finish(strict.request(node), Outcome({"loss": 1.5, "steps": 4.0}, {}), 1.0)
    assert [verdict.passed for verdict in gates_of(node)] == [False, True]
    assert outlook(strict)[0].why == "done in 1 s, loss fails its gate (stop)"
    assert [
        verdict.passed for verdict in gates_of(planned("sft.gates=[{metric: loss, max: 2.0}]")["sft"])
    ] == [True]

    stages = [
        StageView("sft", "sft", (), node.run_dir, "done", gates_of(node)),
        StageView("ppo", "ppo", ("sft",), tmp_path / "none", "not run"),
    ]
    page = write_report(tmp_path / "report", "tiny", stages).read_text()
    assert "The run stopped after sft, which did not pass a gate: there is no evaluation." in page
    assert "at most 1" in page
    assert "failed: the run stopped here" in page
    assert "The SFT did not fit its data" in page
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    first, second = summary["stages"][0]["gates"]
    assert (first["metric"], first["value"], first["max"], first["passed"]) == ("loss", 1.5, 1.0, False)
    assert second["passed"] and summary["stages"][1]["gates"] == []


def test_names_are_those_that_the_losses_write() -> None:
    """Against the functions that make the metrics; whole stages are compared where tests run them."""
    import torch

    from rlhf_core.objectives import losses

    one = torch.ones(2)
    made = {
        "sft": losses.sft_loss(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), 2.0),
        "reward_model": losses.reward_loss(one, -one, 0.0, 0.0, 2.0),
        "dpo": losses.dpo_loss(one, -one, one, one, 0.1, 0.0, "sigmoid", 2.0),
        "kto": losses.kto_loss(one, one, one > 0, 0.0, 0.1, 1.0, 1.0, 2.0),
    }
    base = {"data": {"sources": "x.jsonl"}}
    for kind, loss in made.items():
        stage = recipe_of({"name": "x", "base_model": "b", "stages": {kind: base}}).stages[kind]
        for name in loss.metrics:
            assert has_metric(stage, name), f"{kind}: {name}"


@pytest.mark.parametrize(
    ("loss", "said"), [(0.1, "waits for a person"), (0.9, "nobody is asked while another gate fails")]
)
def test_an_approval_beside_a_failed_gate_asks_nobody(planned: Planned, loss: float, said: str) -> None:
    node = planned(
        "sft.gates=[{metric: loss, max: 0.5}, {metric: loss, max: 0.05, on_fail: warn}, {approve: {within:"
        " 1h}}]"
    )["sft"]
    *_, approval = check("sft", node.config, result_of({"loss": loss}))
    assert approval.said == said and approval.waits and not approval.passed


def notes(metric: str, **fields: Any) -> list[str]:
    ppo = {"actor": "base", "prompts": {"sources": "p.jsonl"}, "reward": "http://host", "critic": "base"}
    stages = {"ppo": ppo | fields | {"gates": [{"metric": metric, "max": 0.2}]}}
    recipe = recipe_of({"name": "x", "base_model": "org/base@" + "0" * 40, "stages": stages})
    return reset_reference_notes(plan(recipe))


def test_a_gate_on_the_kl_is_told_when_the_reference_is_reset() -> None:
    (told,) = notes("kl/mean", reset_reference_every=200)
    assert told.startswith("stages.ppo.gates: kl/mean is measured from the reference, which")
    assert "reset_reference_every=200" in told and "since the last reset" in told
    assert notes("kl/mean") == notes("reward/mean", reset_reference_every=200) == []
