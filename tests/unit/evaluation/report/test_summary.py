"""summary.json from run directories of real records: contents, stability, missing and broken parts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.report.summary import StageView, as_json, read, read_evaluation, summary_of, trend
from rlhf_core.runs.run_dir import METRICS, RunDir
from tests.support.finished_run import (
    CONFIGS,
    DIGESTS,
    MODELS,
    QUESTIONS,
    RATES,
    ROUND2,
    SECONDS,
    finish,
    finished,
    run_dir,
    view,
)


def summarise(name: str, stages: list[StageView]) -> dict[str, Any]:
    return summary_of(name, [read(stage) for stage in stages])


def test_every_stage_with_its_numbers_and_the_evaluation(tmp_path: Path) -> None:
    summary = summarise("demo", finished(tmp_path / "artifacts"))
    assert summary["recipe"] == "demo"
    assert [stage["name"] for stage in summary["stages"]] == list(CONFIGS)
    ppo = summary["stages"][2]
    assert ppo["stage"] == "ppo" and ppo["status"] == "done"
    assert ppo["seconds"] == SECONDS["ppo"] and ppo["digest"] == DIGESTS["ppo"]
    assert ppo["checkpoint"] == f"stages/ppo-{DIGESTS['ppo']}/checkpoint"
    assert (tmp_path / "artifacts" / ppo["checkpoint"] / "model.safetensors").is_file()
    assert ppo["metrics"]["kl/coef"] == 0.01
    by_name = {stage["name"]: stage for stage in summary["stages"]}
    assert by_name["evaluation"]["checkpoint"] is None
    final = {
        "win_rate": RATES[ROUND2],
        "ci_low": RATES[ROUND2] - 0.05,
        "ci_high": RATES[ROUND2] + 0.05,
        "num_questions": QUESTIONS,
    }
    rate = RATES[ROUND2]
    final |= {"length_controlled": rate - 0.03, "lc_low": rate - 0.09, "lc_high": rate + 0.03}
    told = {k: v for k, v in summary["evaluation"].items() if k != "models"}
    parent = told.pop("against_parent")
    assert told == {"model": ROUND2, **final}
    assert parent["parent"] == "iterative_dpo.round1"
    assert parent["win_rate"] == 0.56
    assert parent["num_questions"] == QUESTIONS
    assert by_name["ppo"]["evaluation"]["win_rate"] == RATES["ppo"] and by_name["sft"]["evaluation"] is None
    assert {model: score["win_rate"] for model, score in summary["evaluation"]["models"].items()} == RATES


def test_no_machine_path_and_the_same_content_when_every_stage_is_skipped(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    first = summarise("demo", finished(artifacts))
    second = summarise("demo", [view(artifacts, name, "skipped") for name in CONFIGS])
    assert str(tmp_path) not in as_json(first)
    assert {stage.pop("status") for stage in first["stages"]} == {"done"}
    assert {stage.pop("status") for stage in second["stages"]} == {"skipped"}
    assert first == second


def test_an_unfinished_stage_has_a_digest_and_nothing_else(tmp_path: Path) -> None:
    stages = [
        finish(tmp_path, "sft"),
        view(tmp_path, "reward_model", "failed"),
        view(tmp_path, "evaluation", "not run"),
    ]
    summary = summarise("demo", stages)
    assert summary["stages"][1] == {
        "name": "reward_model",
        "stage": "reward_model",
        "status": "failed",
        "seconds": None,
        "checkpoint": None,
        "digest": DIGESTS["reward_model"],
        "metrics": {},
        "evaluation": None,
        "gates": [],
    }
    assert summary["evaluation"] is None


@pytest.mark.parametrize("broken", ["", "{", '{"baseline": "sft"}'])
def test_a_broken_evaluation_report_counts_as_none(tmp_path: Path, broken: str) -> None:
    stages = finished(tmp_path)
    file = run_dir(tmp_path, "evaluation") / "report" / "eval.json"
    file.write_text(broken.ljust(file.stat().st_size))  # the manifest's size still holds
    assert RunDir(run_dir(tmp_path, "evaluation")).result() is not None
    assert summarise("demo", stages)["evaluation"] is None


def test_a_cut_checkpoint_is_not_reported(tmp_path: Path) -> None:
    stage = finish(tmp_path, "sft")
    (stage.run_dir / "checkpoint" / "model.safetensors").write_bytes(b"w")
    assert summarise("demo", [stage])["stages"][0]["checkpoint"] is None


def test_second_opinions_stay_out_of_the_win_rates(tmp_path: Path) -> None:
    evaluated = read_evaluation([read(stage) for stage in finished(tmp_path)])
    assert evaluated is not None and evaluated.final == ROUND2
    assert tuple(evaluated.decided) == MODELS
    assert {rate.judge for rate in evaluated.decided.values()} == {"rule"}
    assert {rate.judge for rate in evaluated.opinions} == {"reward_model"}


def test_a_models_alias_is_traced_to_its_stage(tmp_path: Path) -> None:
    stages = [read(stage) for stage in finished(tmp_path)]
    evaluation = stages[-2]
    assert evaluation.stage_of(ROUND2, stages) == f"{ROUND2}.dpo"
    assert evaluation.stage_of("ppo", stages) == "ppo"
    assert evaluation.stage_of("someone/else", stages) == "someone/else"


def test_curves_keep_the_last_line_of_a_step_and_pass_over_a_cut_line(tmp_path: Path) -> None:
    stage = view(tmp_path, "sft")
    stage.run_dir.mkdir(parents=True)
    lines = [
        '{"step": 2, "time": 1, "loss": 5}',
        '{"step": 1, "loss": 3, "n": "x"}',
        '{"step": 2, "loss": NaN}',
        "[1]",
        '{"step": 3, "lo',
    ]
    (stage.run_dir / METRICS).write_text("\n".join(lines))
    curves = read(stage).curves
    assert set(curves) == {"loss"}
    first, second = curves["loss"]
    assert first == (1, 3.0) and second[0] == 2 and math.isnan(second[1])


def test_summary_is_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = as_json({"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": "é"}})
    assert json.loads(text, parse_constant=refuse) == {"a": None, "b": [1.5, None], "c": {"d": "é"}}


def test_trend_compares_the_outer_fifths() -> None:
    rising = [(float(i), float(i)) for i in range(20)]
    found = trend(rising)
    assert found is not None and (found.first, found.last) == (1.5, 17.5)
    # variance of four successive integers is 5/3: the standard error is sqrt(2 * 5/3 / 4)
    assert found.errors == pytest.approx(16 / math.sqrt(5 / 6))
    assert trend(rising[:9]) is None
    flat = trend([(float(i), 1.0) for i in range(10)])
    assert flat is not None and flat.errors is None


def test_reading_a_run_needs_no_torch() -> None:
    code = (
        "import sys, evaluation.report.run_page, evaluation.report.summary; sys.exit('torch' in sys.modules or"
        " 'prefect' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], timeout=120).returncode
        == 0
    )
