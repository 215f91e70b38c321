"""The regression stage with vLLM played by a double: what passes, what changed since the last trusted result,
and the band."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evaluation.regression.regression_report import REGRESSION, QuestionOutcome, RegressionReport, band_of
from evaluation.regression.regression_stage import run
from rlhf_core.config import Gate, OpenAIJudge, Regression, RewardJudge, Source
from rlhf_core.config.kinds import has_metric
from rlhf_core.records import StageResult
from rlhf_core.runs.run_dir import RESULT, RunDir, run_in_directory
from tests.support.chat_endpoint import Reply, completion, serving
from tests.support.evaluations import COUNT, SKILL, Double, Setting, make_reward_model
from tests.support.stage_request import stage_request

UIDS = [f"q{n}" for n in range(COUNT)]


def regress(
    setting: Setting, digest: str, skill: float, **changes: Any
) -> tuple[RegressionReport, StageResult]:
    """Runs the stage in a directory of its own; `skill`: share of the questions that the final model answers
    rightly."""
    Path(setting.inputs["ppo"], SKILL).write_text(str(skill))
    fields: dict[str, Any] = dict(
        models=("dpo", "ppo"), questions=Source(path=setting.questions), bootstrap_rounds=50
    )
    config = Regression(**{**fields, "prompt_max_len": 128, "generate_max_len": 24, **changes})
    directory = RunDir(setting.folder / "artifacts" / "stages" / f"regression-{digest}")
    directory.prepare(stage_request(config, setting.inputs, digest=digest, seed=1))
    result = run_in_directory(directory.path, run)
    assert [name for name in result.metrics if not has_metric(config, name)] == []
    order = 1_000_000 + int(digest)
    os.utime(directory / RESULT, (order, order))
    report = RegressionReport.read(directory / "report" / REGRESSION)
    assert report is not None
    return report, result


def test_a_first_result_has_no_band_and_says_what_passes(setting: Setting) -> None:
    report, result = regress(setting, "1", 0.9)
    metrics = result.metrics
    assert metrics["passed/ppo"] == pytest.approx(0.9) and metrics["passed/dpo"] == pytest.approx(0.7)
    assert [
        metrics[name] for name in ("history", "deviation", "out_of_band", "newly_failed/ppo", "recovered/ppo")
    ] == [0.0] * 5
    assert report.band is None and report.final == "ppo" and report.questions[0].prompt == "Reverse w00"
    assert [q.uid for q in report.questions if q.outcomes["ppo"] == "failed"] == UIDS[18:]
    # those of an evaluation, which gates and loops read
    assert not any(name.startswith(("win_rate", "ci_low")) for name in metrics)
    assert metrics["right/sft"] == 0.5
    assert "report/regression.md" in result.files


def test_what_changed_since_the_last_trusted_result_is_told(setting: Setting) -> None:
    regress(setting, "1", 0.9)
    report, result = regress(setting, "2", 0.8)
    assert report.newly_failed("ppo") == UIDS[16:18]
    assert result.metrics["newly_failed/ppo"] == 2
    assert result.metrics["history"] == 1
    assert report.newly_failed("dpo") == UIDS[14:18]  # against the final model of the last result
    later = regress(setting, "3", 1.0)[0]
    metrics = regress(setting, "3", 1.0)[1].metrics
    assert later.recovered("ppo") == UIDS[16:]
    assert metrics["recovered/ppo"] == 4
    assert metrics["newly_failed/ppo"] == 0
    text = (setting.folder / "artifacts/stages/regression-2/report/regression.md").read_text()
    assert "| q16 | failed | failed | newly failed |" in text and text.index("| q16 ") < text.index("| q0 ")


def test_the_band_is_two_sided(setting: Setting) -> None:
    for number, skill in enumerate((0.5, 0.5, 0.5), 1):
        regress(setting, str(number), skill)
    inside = regress(setting, "4", 0.6)[1].metrics
    assert inside["out_of_band"] == 0 and inside["deviation"] > 0 and inside["history"] == 3
    gates = (Gate(metric="out_of_band", max=0),)  # so that the one is no history of the other
    worse, better = (
        regress(setting, number, skill, gates=gates)[1].metrics for number, skill in (("5", 0.0), ("6", 1.0))
    )
    assert worse["out_of_band"] == better["out_of_band"] == 1
    assert worse["deviation"] < -3
    assert better["deviation"] > 3


def test_results_whose_gates_failed_or_of_another_judge_are_not_trusted(setting: Setting) -> None:
    regress(setting, "1", 0.4, gates=(Gate(metric="passed/ppo", min=0.5),))
    regress(setting, "2", 0.7, gates=(Gate(metric="passed/ppo", min=0.5),))
    make_reward_model(setting, "reward_model", seed=0)
    regress(setting, "3", 0.6, judges=(RewardJudge(),))
    regress(setting, "4", 0.6, baseline="dpo", models=("ppo",))
    report, result = regress(setting, "5", 0.9)
    assert (
        result.metrics["history"] == 1 and report.band is not None and report.band.mean == pytest.approx(0.7)
    )


def test_only_the_last_results_count_and_none_with_history_zero(setting: Setting) -> None:
    for number, skill in enumerate((0.1, 0.6, 0.8), 1):
        regress(setting, str(number), skill, history=0)
    report, _ = regress(setting, "4", 0.7, history=2)
    assert report.band is not None and report.band.results == 2 and report.band.mean == pytest.approx(0.7)
    assert regress(setting, "5", 0.7, history=0)[0].band is None


def test_a_finished_stage_is_not_done_again(setting: Setting) -> None:
    first = regress(setting, "1", 0.9)[1]
    Double.log.clear()
    assert regress(setting, "1", 0.9)[1] == first and Double.log == []


def outcomes(passed: int, of: int) -> Mapping[str, QuestionOutcome]:
    return {f"q{i}": "passed" if i < passed else "failed" for i in range(of)}


def test_new_questions_of_a_suite_do_not_move_the_share_that_is_compared() -> None:
    earlier = [outcomes(90, 100), outcomes(88, 100)]
    # questions that the last round lost
    grown = {**outcomes(89, 100), **{f"new{i}": "failed" for i in range(40)}}
    band = band_of(grown, earlier, 3.0)  # type: ignore[arg-type]
    assert (
        band is not None and band.questions == 100 and not band.outside and band.share == pytest.approx(0.89)
    )


def test_a_missing_verdict_is_a_failure() -> None:
    silent: dict[str, QuestionOutcome] = {f"q{i}": "no verdict" for i in range(100)}
    band = band_of(silent, [outcomes(90, 100)], 3.0)
    assert band is not None and band.outside and band.deviation < -3


def test_equal_results_make_no_band_of_width_zero() -> None:
    band = band_of(outcomes(97, 100), [outcomes(100, 100)] * 5, 3.0)
    assert band is not None and band.spread > 0 and not band.outside
    assert band_of(outcomes(1, 2), [], 3.0) is None
    assert band_of(outcomes(1, 2), [{"other": "passed"}], 3.0) is None


def test_a_judge_that_stops_early_is_refused() -> None:
    judges = [{"kind": "openai", "model": "judge", "interval_width": 0.1}]
    with pytest.raises(
        ValueError, match=r"a regression suite .* all of its questions: leave interval_width out"
    ):
        Regression.model_validate({"models": ["ppo"], "questions": {"path": "suite.jsonl"}, "judges": judges})


@pytest.mark.usefixtures("judge_key")
def test_a_chat_judge_decides_what_is_lost_and_a_question_without_verdict_is_not_passed(
    setting: Setting,
) -> None:
    right = {word: word[::-1] for word in (f"w{n:02d}" for n in range(COUNT))}

    def script(_: int, request: dict[str, Any]) -> Reply:
        text = request["messages"][1]["content"]
        word = re.findall(r"Reverse (w\d\d)", text)[0]
        if word == "w00":
            return completion("I cannot decide.")
        first, second = (
            answer == right[word]
            for answer in re.findall(r"Start of assistant .'s answer\|>\n(.*?)\n<\|End", text)
        )
        verdict = "[[A=B]]" if first == second else "[[A>B]]" if first else "[[B>A]]"
        # ends of lines in Unicode, which JSON does not escape
        return completion(f"One\u2028two\u2029three\x85{verdict}")

    with serving(script) as endpoint:
        judge = dict(
            kind="openai", model="judge", base_url=endpoint.url, api_key_env="JUDGE_KEY", max_failed=0.2
        )
        report, result = regress(setting, "1", 0.4, judges=(OpenAIJudge.model_validate(judge),))
    outcomes = report.final_outcomes
    assert outcomes["q0"] == "no verdict" and result.metrics["unjudged/ppo"] == 1
    # sft answers the first ten rightly
    assert [uid for uid, outcome in outcomes.items() if outcome == "failed"] == ["q8", "q9"]
    # also those that both answer wrongly: they tie
    assert result.metrics["passed/ppo"] == pytest.approx(17 / 20)
