"""The drift stage on the files of a finished evaluation, with earlier results beside it."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import evaluation.drift.drift_stage as drift_stage
from evaluation.drift.drift_report import DRIFT, DriftReport
from evaluation.report.run_page import render
from evaluation.report.summary import StageView, read
from rlhf_core.config import Drift
from rlhf_core.config.kinds import has_metric
from rlhf_core.runs.run_dir import RunDir
from tests.support.evaluations import Setting, evaluate, make_reward_model, make_setting
from tests.support.programs import captured
from tests.support.stage_request import stage_request
from tests.support.text_rows import rows_of_text

RULE = {"kind": "rule"}
REWARD = {"kind": "reward", "reward": "rm"}


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """An evaluation of sft, dpo and ppo at temperature 1 with a rule and a reward model as judges, finished,
    and prompts and anchors."""
    made = make_setting(tmp_path, monkeypatch)
    make_reward_model(made, "rm", 3)
    for seed, name in enumerate(("sft", "dpo", "ppo")):
        torch.manual_seed(seed)
        folder = made.inputs[name]
        Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder, initializer_range=0.3)).save_pretrained(folder)
    directory, _, _ = evaluate(made, "stages/evaluation-0", judges=(RULE, REWARD), temperature=1.0)
    made.inputs["evaluation"] = str(directory / "report")
    for file, topic in (("past.jsonl", "sum"), ("now.jsonl", "poem")):
        rows = [{"prompt": f"Please write the {topic} of {n} and {n % 7}"} for n in range(40)]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [
        {"prompt": f"Say {n}", "answer": "yes", "answer_a": "no", "answer_b": "yes", "verdict": "B"}
        for n in range(12)
    ]
    (tmp_path / "anchors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return made


def drift(
    setting: Setting, key: str, name: str = "drift", **changes: Any
) -> tuple[RunDir, DriftReport, dict[str, float]]:
    """Runs and finishes a drift stage."""
    sources = {
        "prompts": {"sources": str(setting.folder / "now.jsonl")},
        "past_prompts": {"sources": str(setting.folder / "past.jsonl")},
    }
    config = Drift.model_validate({"model": "ppo", "bootstrap_rounds": 200, **sources, **changes})
    run = RunDir(setting.folder / "stages" / f"{name}-{key}")
    run.prepare(stage_request(config, setting.inputs, name=name, digest=key, seed=1))
    outcome = drift_stage.run(run.request(), run)
    assert [metric for metric in outcome.metrics if not has_metric(config, metric)] == []
    run.finish(run.request(), outcome, 0.1)
    return run, DriftReport.model_validate_json((run / "report" / DRIFT).read_text()), outcome.metrics


def with_anchors(setting: Setting, **changes: Any) -> dict[str, Any]:
    return {"anchors": {"pairs": {"path": str(setting.folder / "anchors.jsonl")}, "judge": RULE, **changes}}


def test_the_stage_reads_an_evaluation_and_gives_every_signal(setting: Setting) -> None:
    _, report, metrics = drift(setting, "1", kl=True, **with_anchors(setting))
    names = "prompts/divergence prompts/length answers/length refusals/model refusals/reference"
    names += " refusals/rise judge/reward_correlation kl anchors/changed anchors/shift"
    assert [signal.name for signal in report.signals] == names.split()
    assert all(signal.low <= signal.value <= signal.high for signal in report.signals)
    assert metrics["prompts/divergence"] > 0.01 and metrics["prompts/divergence_p"] < 0.01
    # the double's right answers are shorter than its "no idea", and ppo gives more of them
    assert metrics["answers/length"] < 1
    assert metrics["refusals/rise"] == 0 and metrics["refusals/rise_p"] == 1
    assert abs(metrics["kl"]) > 0.1
    assert metrics["anchors/changed"] == 0 and metrics["anchors/age_days"] == 0
    assert not report.history and not any(name.endswith("/change") for name in metrics) and not report.notes


def test_changes_are_from_the_newest_earlier_result_of_the_same_stage(setting: Setting) -> None:
    drift(setting, "1", model="dpo")
    drift(setting, "0", name="drift-other")  # of another stage, though its folder begins alike
    unfinished, _, _ = drift(setting, "5")
    (unfinished / "result.json").unlink()
    before = drift(setting, "2", max_prompts=39)[2]
    run, report, metrics = drift(setting, "3", prompts={"sources": str(setting.folder / "past.jsonl")})
    assert [(one.digest, one.model) for one in report.history] == [("1", "dpo"), ("2", "ppo")]
    change = metrics["prompts/divergence"] - before["prompts/divergence"]
    assert (
        change < 0 and metrics["prompts/divergence/change"] == change and metrics["refusals/rise/change"] == 0
    )
    page = render("tiny", [read(StageView("drift", "drift", (), run.path, "done"))])
    assert "Has anything drifted?" in page
    assert page.count('<td class="mono">') >= 3
    assert 'aria-label="drift"' in page


def test_the_same_inputs_give_the_same_numbers(setting: Setting) -> None:
    assert drift(setting, "1", name="one")[2] == drift(setting, "1", name="two")[2]


def test_anchors_are_judged_again_when_their_verdicts_are_old(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    make = drift_stage.make_judge
    monkeypatch.setattr(
        drift_stage, "make_judge", lambda name, *rest: judged.append(name) or make(name, *rest)
    )
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for day, times in ((0, 1), (6.9, 1), (7.1, 2), (8, 2)):

        class At(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return start + timedelta(days=day)  # noqa: B023

        monkeypatch.setattr(drift_stage, "datetime", At)
        _, report, metrics = drift(setting, f"{day}", **with_anchors(setting))
        assert len(judged) == times, day
        assert metrics["anchors/age_days"] == pytest.approx({0: 0, 6.9: 6.9, 7.1: 0, 8: 0.9}[day])
        assert report.values["anchors/changed"] == 0
    drift(setting, "other", **with_anchors(setting, judge={"kind": "reward", "reward": "rm"}))
    assert judged == ["rule", "rule", "rm"]


@pytest.mark.parametrize(
    ("row", "told"),
    rows_of_text(r"""
    {prompt: x, answer_a: '1', answer_b: '2'} | anchors\.jsonl, row 1: the verdict of an anchor is A, B or tie
    {prompt: x, answer_a: '1', verdict: A} | anchors\.jsonl, row 1: an anchor needs the text column 'answer_b'
    """),
)
def test_a_wrong_anchor_is_a_sentence(setting: Setting, row: dict[str, str], told: str) -> None:
    (setting.folder / "anchors.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=told):
        drift(setting, "1", **with_anchors(setting))


def test_a_model_that_did_not_answer_is_a_sentence(setting: Setting) -> None:
    setting.inputs["other"] = str(setting.folder / "rm")
    with pytest.raises(
        ValueError, match=r"other did not .* the evaluation evaluation, but sft, dpo, ppo did"
    ):
        drift(setting, "1", model="other")
    other, _, _ = evaluate(setting, "stages/greedy-0", temperature=0.0)
    setting.inputs["evaluation"] = str(other / "report")
    _, report, _ = drift(setting, "2")
    assert report.notes == (
        "The evaluation has no reward model as second judge, so the agreement of the two is unknown.",
    )
    with pytest.raises(ValueError, match="kl needs answers sampled at temperature 1"):
        drift(setting, "3", kl=True)


def test_the_present_are_the_newest_prompts_once_each(tmp_path: Path) -> None:
    for file, numbers in (("now.jsonl", [0, 1, 2, 3, 1, 4]), ("past.jsonl", [*range(20), 3])):
        (tmp_path / file).write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in numbers))
    sources = {
        "prompts": {"sources": str(tmp_path / "now.jsonl")},
        "past_prompts": {"sources": str(tmp_path / "past.jsonl")},
    }
    config = Drift.model_validate({"model": "ppo", "max_prompts": 3, **sources})
    present, past = drift_stage.prompt_texts(config, seed=0)
    assert [text.split()[-1] for text in present] == ["4", "1", "3"]
    assert len(set(past)) == 3 and drift_stage.prompt_texts(config, seed=1)[1] != past


def test_the_stage_runs_in_its_own_process(setting: Setting) -> None:
    done, _, metrics = drift(setting, "1", **with_anchors(setting))
    (done / "result.json").unlink()
    command = [sys.executable, "-m", "evaluation", str(done.path)]
    ran = captured(command, cwd=Path(__file__).parents[4], timeout=300)
    result = done.result()
    assert ran.returncode == 0 and result, ran.stderr
    assert result.metrics == metrics and "prompts/divergence: " in ran.stdout
