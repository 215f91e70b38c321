"""The page's part about a regression suite: what passes, what changed, why a question is there; and that it
is no evaluation."""

from __future__ import annotations

from pathlib import Path

from evaluation.regression.regression_report import (
    REGRESSION,
    QuestionOutcome,
    QuestionResult,
    RegressionReport,
    band_of,
)
from evaluation.report.run_page import write_report
from evaluation.report.summary import StageView, read, read_evaluation
from rlhf_core.config import Regression
from rlhf_core.records import EvalReport, WinRate
from rlhf_core.runs.run_dir import Outcome, RunDir
from tests.support.stage_request import stage_request


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
