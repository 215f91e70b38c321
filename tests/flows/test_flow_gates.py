"""Gates in a flow: which stages a failed one stops, also one of a calibration, which continue, and what the command
prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flows.cli
import tasks.stages
from flows.alignment import alignment, stage
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import GateFailed
from rlhf_core.runs.launch import launch
from tests.support.chat_endpoint import completion, serving
from tests.support.labels import label, write_labels
from tests.support.writing_stages import ORDER, TEXT, artifacts, attempts, statuses

pytestmark = pytest.mark.usefixtures("prefect")


def test_a_failed_gate_stops_the_run_and_a_relaxed_one_continues_it(recipe: Callable[..., Recipe]) -> None:
    gate = "reward_model.gates=[{metric: loss, max: 1.0}]"
    told = (
        "^stage reward_model: loss is 1.5, and the gate requires at most 1: what depends on it was not"
        " started. The reward model did not"
    )
    for _ in range(2):  # also when the stage is found done
        with pytest.raises(GateFailed, match=told):
            alignment(recipe(gate))
        assert attempts() == ["sft", "reward_model"]
    assert statuses() == {"sft": "skipped", "reward_model": "skipped"} | dict.fromkeys(ORDER[2:], "not run")
    page = Path("artifacts/tiny/report.html").read_text()
    assert "The run stopped after reward_model, which did not pass a gate" in page
    assert "failed: the run stopped here" in page
    assert "| loss | 1.5 | at most 1 | failed | stop |" in artifacts()["reward-model-gates"]
    with pytest.raises(GateFailed, match="reward_model"):
        stage(recipe(gate), "loop.round1")  # its parents' gates also apply
    assert attempts() == ["sft", "reward_model"]

    alignment(recipe("reward_model.gates=[{metric: loss, max: 2.0}]"))
    assert attempts() == ORDER
    summary = json.loads(Path("artifacts/tiny/summary.json").read_text())
    assert [gate["passed"] for gate in summary["stages"][1]["gates"]] == [True]


def test_warn_continues_and_a_failed_branch_skips_its_dependents(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(GateFailed, match=r"stage reward_model: loss is 1\.5") as held:
        alignment(
            recipe(
                "sft.gates=[{metric: loss, max: 1, on_fail: warn}]",
                "reward_model.gates=[{metric: loss, max: 1, on_fail: branch}]",
            )
        )
    assert "sft" not in str(held.value).partition(":")[0]
    assert attempts() == ["sft", "reward_model"]  # everything else needs the reward model

    Path("recipe.yaml").write_text(TEXT + "  more: {stage: dpo, data: {sources: pairs.jsonl}}\n")
    with pytest.raises(GateFailed, match="stage reward_model"):
        alignment(recipe("reward_model.gates=[{metric: loss, max: 1, on_fail: branch}]"))
    assert attempts() == ["sft", "reward_model", "more"]
    assert statuses()["more"] == "done" and statuses()["evaluation"] == "not run"


def test_the_terminal_shows_gates(recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    gate = "sft.gates=[{metric: steps, min: 1}]"  # the stages of this test write no steps
    assert flows.cli.main(["validate", "recipe.yaml", gate]) == 0
    assert flows.cli.main(["validate", "recipe.yaml", "sft.gates=[{metric: eval/loss, max: 1}]"]) == 2
    assert "stages.sft.gates.0.metric: unknown metric 'eval/loss'" in capsys.readouterr().err
    assert flows.cli.main(["run", "recipe.yaml", gate]) == 1
    shown = capsys.readouterr()
    assert (
        "stage sft: its result has no metric steps, and the gate requires at least 1: what depends on it was"
        " not started." in shown.err
    )
    assert "Traceback" not in shown.err and "1 failed" in shown.out
    assert (shown.out + shown.err).count("its result has no metric steps") == 1, "a failed gate is told once"
    assert attempts() == ["sft"]
    assert flows.cli.main(["run", "recipe.yaml", "sft.gates=[{metric: steps, min: 1, on_fail: warn}]"]) == 0
    assert attempts() == ORDER and "gate failed (warn) stage sft" in capsys.readouterr().out


JUDGE = "{kind: openai, model: judge, base_url: URL, api_key_env: JUDGE_KEY}"
STAGES = f"""
  calibration:
    judge: {JUDGE}
    labels: labels.jsonl
    gates: [{{metric: position_bias/ci_high, max: 0.1, on_fail: branch}}]
"""


@pytest.mark.usefixtures("judge_key")
def test_a_planted_position_bias_keeps_the_evaluation_from_starting(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(package: str, path: Path, name: str, *rest: Any) -> Any:
        return launch("evaluation" if name == "calibration" else "stage_for_flows", path, name, *rest)

    monkeypatch.setattr(tasks.stages, "launch", started)
    write_labels(Path("labels.jsonl"), *(label(i, ("A>B", "B>A")[i % 2], uid=f"q{i}") for i in range(12)))
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:  # the answer shown first always wins
        waiting = TEXT.replace(
            "evaluation: {models: [loop]",
            f"evaluation: {{models: [loop], calibration: calibration, judges: [{JUDGE}]",
        )
        Path("recipe.yaml").write_text((waiting + STAGES).replace("URL", endpoint.url))
        with pytest.raises(
            GateFailed,
            match=r"stage calibration: position_bias/ci_high is 1, and the gate requires at most 0\.1",
        ):
            alignment(recipe())
        assert len(endpoint.requests) == 24
        assert statuses()["calibration"] == "done"
        assert statuses()["evaluation"] == "not run"
        assert "evaluation" not in attempts()
        shown = artifacts()["calibration-calibration"]
        assert "| position bias: wins of the answer shown first minus shown second | 1.000 |" in shown
        page = Path("artifacts/tiny/report.html").read_text()
        assert "Can the judge be trusted?" in page
        assert "failed: the stages that depend on calibration were left out" in page

        alignment(recipe("calibration.gates=[]"))
        assert len(endpoint.requests) == 24 and attempts()[-1] == "evaluation"
        page = Path("artifacts/tiny/report.html").read_text()
        assert "chooses the same winner as people in 0 % of 12 pairs (kappa 0.00" in page
