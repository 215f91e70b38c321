"""Pages of calibrations and of regression suites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluation.calibration.calibration_report import CALIBRATION, CalibrationReport, Estimate
from evaluation.regression.regression_report import (
    REGRESSION,
    QuestionOutcome,
    QuestionResult,
    RegressionReport,
    band_of,
)
from evaluation.report.calibrations import calibrations, judge_belief
from evaluation.report.run_page import write_report
from evaluation.report.summary import StageView, read, read_evaluation
from rlhf_core.config import Calibration, Evaluation, OpenAIJudge, Regression, RewardJudge, StageConfig
from rlhf_core.config.judging.calibration import judge_identity
from rlhf_core.records import EvalReport, Judging, WinRate
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.stage_request import stage_request

CHAT = {"kind": "openai", "model": "judge-x", "base_url": "https://judge.example/v1"}
NONE = "The judge judge-x is not calibrated: add a stage of kind calibration."


def stage(
    folder: Path, name: str, config: StageConfig, inputs: dict[str, str], file: str, content: str
) -> StageView:
    run = RunDir(folder / "stages" / f"{name}-{'0' * 16}")
    request = stage_request(config, inputs, name=name, digest="0" * 16)
    run.prepare(request)
    (run / "report").mkdir(exist_ok=True)
    (run / "report" / file).write_text(content)
    run.finish(request, Outcome({}, {"report": "report"}), 1.0)
    return StageView(name, config.stage, (), run.path, "done")


def evaluation(folder: Path, judge: dict[str, Any], inputs: dict[str, str] | None = None) -> StageView:
    config = Evaluation.model_validate(
        {"models": ["ppo"], "questions": {"path": "q.jsonl"}, "judges": [judge]}
    )
    name = judge.get("model") or judge.get("reward") or "rule"
    rate = WinRate(
        model="ppo", baseline="sft", judge=name, win_rate=0.6, ci_low=0.55, ci_high=0.65, num_questions=300, num_failed=0,
        swap_consistency=0.9, by_category={},
    )  # fmt: skip
    report = EvalReport(baseline="sft", judge=name, win_rates=(rate,), right={}, mean_tokens={}, truncated={})
    return stage(folder, "evaluation", config, inputs or {}, "eval.json", report.model_dump_json())


def calibrated(
    folder: Path, judge: dict[str, Any], inputs: dict[str, str] | None = None, **changes: Any
) -> StageView:
    config = Calibration.model_validate({"judge": judge, "labels": "labels.jsonl"})
    measures = {
        "agreement": Estimate(value=0.78, ci_low=0.72, ci_high=0.84),
        "kappa": Estimate(value=0.61, ci_low=0.5, ci_high=0.7),
        "human_agreement": Estimate(value=0.81, ci_low=0.75, ci_high=0.86),
    }
    report = CalibrationReport(
        judge=judge.get("model") or judge["reward"],
        identity=judge_identity(config.judge, inputs or {}, config.template_args),
        pairs=200,
        uids=190,
        labels=260,
        annotators=3,
        unjudged=0,
        measures=measures,
        confusion=((80, 3, 12), (5, 6, 4), (11, 4, 75)),
        judging=Judging(questions=200, games=400, failed=0),
    ).model_copy(update=changes)
    return stage(folder, "calibration", config, inputs or {}, CALIBRATION, report.model_dump_json())


def belief(*views: StageView) -> str:
    found = [read(view) for view in views]
    return judge_belief(read_evaluation(found), found)


def test_a_judge_without_calibration_is_told(tmp_path: Path) -> None:
    assert belief(evaluation(tmp_path, CHAT)) == NONE
    page = write_report(tmp_path / "demo", "demo", [evaluation(tmp_path, CHAT)]).read_text()
    assert NONE in page and "Can the judge be trusted?" not in page


def test_a_rule_needs_none_and_no_evaluation_says_nothing(tmp_path: Path) -> None:
    assert belief(evaluation(tmp_path, {"kind": "rule"})) == "" and belief() == ""


def test_a_calibrated_judge_is_told_with_its_kappa(tmp_path: Path) -> None:
    views = [
        calibrated(tmp_path, CHAT | {"api_key_env": "OTHER", "concurrency": 2}),
        evaluation(tmp_path, CHAT | {"interval_width": 0.1}),
    ]
    told = (
        "The judge judge-x chooses the same winner as people in 78 % of 200 pairs (kappa 0.61, 95 % interval"
        " 0.50 to 0.70)."
    )
    assert belief(*views) == told
    page = write_report(tmp_path / "demo", "demo", views).read_text()
    assert told in page
    assert "Can the judge be trusted?" in page
    assert "Agreement beyond chance is substantial" in page
    assert '<td>people: tie</td><td class="n">5</td><td class="n">6</td><td class="n">4</td>' in page
    assert "two people: same winner" in page


@pytest.mark.parametrize(
    "other",
    [{"model": "judge-y"}, {"base_url": "https://other.example/v1"}, {"max_tokens": 64}],
    ids=lambda other: next(iter(other)),
)
def test_the_calibration_of_another_judge_does_not_count(tmp_path: Path, other: dict[str, Any]) -> None:
    assert belief(calibrated(tmp_path, CHAT | other), evaluation(tmp_path, CHAT)) == NONE


def test_the_calibration_of_an_earlier_checkpoint_does_not_count(tmp_path: Path) -> None:
    reward = {"kind": "reward", "reward": "reward_model"}
    first, second = (
        {"reward_model": f"/artifacts/stages/reward_model-{digest}/checkpoint"} for digest in ("1", "2")
    )
    assert "is not calibrated:" in belief(
        calibrated(tmp_path, reward, first), evaluation(tmp_path, reward, second)
    )
    elsewhere = {"reward_model": "/other/artifacts/stages/reward_model-2/checkpoint"}
    assert "kappa 0.61" in belief(
        calibrated(tmp_path, reward, elsewhere), evaluation(tmp_path, reward, second)
    )


def test_an_unfinished_calibration_does_not_count(tmp_path: Path) -> None:
    view = calibrated(tmp_path, CHAT)
    (view.run_dir / "result.json").unlink()
    assert belief(view, evaluation(tmp_path, CHAT)) == NONE and calibrations([read(view)]) == []


def test_names_are_escaped(tmp_path: Path) -> None:
    judge = CHAT | {"model": "<script>alert(1)</script>"}
    page = write_report(
        tmp_path / "demo", "demo", [calibrated(tmp_path, judge), evaluation(tmp_path, judge)]
    ).read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_the_arguments_of_a_reward_judges_template_identify_it() -> None:
    reward, chat = RewardJudge(), OpenAIJudge(model="m")
    given = {"enable_thinking": False}
    assert judge_identity(reward, {}, given) != judge_identity(reward, {}, {})
    assert judge_identity(chat, {}, given) == judge_identity(chat, {}, {})
    assert judge_identity(reward, {}, {}) == "2cfd36a1f21f58e6", "as before there were arguments"


def regression(folder: Path, count: int = 3) -> StageView:
    run = RunDir(folder / "stages" / f"regression-{'0' * 16}")
    config = Regression.model_validate({"models": ["dpo", "ppo"], "questions": {"path": "suite.jsonl"}})
    request = stage_request(config, digest="0" * 16)
    run.prepare(request)
    (run / "report").mkdir()
    results: list[QuestionOutcome] = ["passed", "failed", "passed"]
    questions = tuple(
        QuestionResult(
            uid=f"q{i}",
            prompt=f"Question {i} with <b>marks</b>?",
            reason=f"reason <i>{i}</i>",
            source="night 3",
            outcomes={"dpo": "passed", "ppo": results[i % 3]},
        )
        for i in range(count)
    )
    before: dict[str, QuestionOutcome] = {"q0": "passed", "q1": "passed", "q2": "failed"}
    report = RegressionReport(
        baseline="sft",
        final="ppo",
        models=("dpo", "ppo"),
        judge="rule",
        questions=questions,
        before=before,
        band=band_of({question.uid: question.outcomes["ppo"] for question in questions}, [before], 3.0),
    )
    rate = WinRate(
        model="ppo", baseline="sft", judge="rule", win_rate=0.6, ci_low=0.5, ci_high=0.7, num_questions=3, num_failed=0,
        swap_consistency=1.0, by_category={},
    )  # fmt: skip
    judged = EvalReport(
        baseline="sft", judge="rule", win_rates=(rate,), right={}, mean_tokens={}, truncated={}
    )
    (run / "report" / "eval.json").write_text(judged.model_dump_json())
    (run / "report" / REGRESSION).write_text(report.model_dump_json())
    run.finish(request, Outcome({"passed/ppo": 2 / 3, "passed/dpo": 1.0}, {"report": "report"}), 1.0)
    return StageView("regression", "regression", (), run.path, "done")


def test_the_page_names_each_question_with_its_reason(tmp_path: Path) -> None:
    page = write_report(tmp_path / "demo", "demo", [regression(tmp_path)]).read_text()
    assert "What was lost before" in page and "Passed: dpo 100.0 %, ppo 66.7 %." in page
    assert "reason &lt;i&gt;1&lt;/i&gt;" in page and "with &lt;b&gt;marks&lt;/b&gt;?" in page
    assert page.index("<td>q1</td>") < page.index("<td>q0</td>")  # those that fail come first
    assert "<td>newly failed</td>" in page and "<td>recovered</td>" in page
    assert "Of the 3 questions that the last 1 trusted results have too, ppo passes 66.7 %" in page


def test_a_suite_is_not_the_evaluation_of_a_run(tmp_path: Path) -> None:
    assert read_evaluation([read(regression(tmp_path))]) is None


def test_a_long_suite_is_cut(tmp_path: Path) -> None:
    page = write_report(tmp_path / "demo", "demo", [regression(tmp_path, 250)]).read_text()
    assert page.count("<td>night 3</td>") == 200 and "200 of 250;" in page
