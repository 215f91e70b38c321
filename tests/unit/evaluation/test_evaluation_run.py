"""The evaluation stage from questions to report, with vLLM played by a double; tokenizer, reward model and
files are real."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from evaluation.answers.local_answers import read_answers
from evaluation.evaluation_stage import run
from rlhf_core.__main__ import main
from rlhf_core.config import RewardJudge, RuleJudge, Source
from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.data.questions import load_questions
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.records import EvalReport, Judgment
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from tests.support.evaluations import (
    COUNT,
    Double,
    Setting,
    evaluate,
    make_model,
    make_reward_model,
    request,
)
from tests.support.programs import captured


def test_the_rule_decides_and_the_report_says_by_how_much(setting: Setting) -> None:
    directory, report, metrics = evaluate(setting)
    assert report.right == pytest.approx({"sft": 0.5, "dpo": 0.7, "ppo": 0.9})
    rates = {rate.model: rate for rate in report.win_rates}
    # dpo wins the 4 questions that only it gets right, ppo 8; all others tie.
    assert rates["dpo"].win_rate == pytest.approx((4 + 16 / 2) / 20)
    assert rates["ppo"].win_rate == pytest.approx((8 + 12 / 2) / 20)
    assert rates["ppo"].ci_low > 0.5 and rates["ppo"].ci_high < 0.9
    assert rates["ppo"].by_category == pytest.approx({"even": 0.7, "odd": 0.7})
    assert rates["ppo"].swap_consistency == 1.0
    assert rates["ppo"].num_failed == 0
    assert rates["ppo"].num_questions == 20
    assert report.mean_tokens["sft"] == pytest.approx((10 * 3 + 10 * 7) / 20) and report.truncated["sft"] == 0
    for model in ("dpo", "ppo"):
        rate = rates[model]
        values = [metrics[f"{name}/{model}"] for name in ("win_rate", "ci_low", "ci_high", "right", "length")]
        assert values == [
            rate.win_rate,
            rate.ci_low,
            rate.ci_high,
            report.right[model],
            report.mean_tokens[model],
        ]
    assert metrics["right/sft"] == 0.5 and "win_rate/sft" not in metrics and "judge_agreement" not in metrics
    judged = [
        Judgment.model_validate_json(line)
        for line in (directory / "report/judgments/rule.jsonl").read_text().splitlines()
    ]
    assert len(judged) == 40 and {judgment.baseline for judgment in judged} == {"sft"}
    assert json.loads((directory / "metrics.jsonl").read_text())["win_rate/ppo"] == rates["ppo"].win_rate


def test_checkpoints_of_one_architecture_share_an_engine_and_others_get_their_own(setting: Setting) -> None:
    setting.inputs["ppo"] = make_model(setting.folder / "wide", 0.9, hidden=32)
    evaluate(setting)
    assert [entry for entry in Double.log if entry[0] != "generate"] == [
        ("open", "sft"), ("load", "dpo"), ("close", "dpo"), ("open", "wide"), ("close", "wide"),
    ]  # fmt: skip


def test_whole_answers_are_not_generated_again(setting: Setting) -> None:
    directory, first, _ = evaluate(setting)
    (directory / "report/answers/dpo.jsonl").unlink()
    (directory / "report/eval.json").unlink()
    Double.log.clear()
    _, second, _ = evaluate(setting)
    assert Double.log == [("open", "dpo"), ("generate", "dpo"), ("close", "dpo")]
    assert first == second


def test_answers_are_written_in_arena_hards_format(setting: Setting) -> None:
    directory, _, _ = evaluate(setting)
    rows = [json.loads(line) for line in (directory / "report/answers/ppo.jsonl").read_text().splitlines()]
    assert [row["uid"] for row in rows] == [f"q{n}" for n in range(COUNT)]
    assert rows[3]["model"] == "ppo"
    assert rows[3]["messages"] == [
        {"role": "user", "content": "Reverse w03"},
        {"role": "assistant", "content": {"answer": "30w"}},
    ]
    assert rows[3]["metadata"]["token_len"] == 3
    # arena-hard-auto counts its columns
    assert list(rows[3]["metadata"]) == ["token_len", "header_count", "list_count", "bold_count"]


def test_the_order_of_models_changes_nothing(setting: Setting) -> None:
    _, one, _ = evaluate(setting, "one", temperature=0.7)
    _, other, _ = evaluate(setting, "other", temperature=0.7, models=("ppo", "sft", "dpo", "ppo"))
    assert {rate.model: rate for rate in one.win_rates} == {rate.model: rate for rate in other.win_rates}
    assert [rate.model for rate in other.win_rates] == ["ppo", "dpo"]  # the baseline does not battle itself
    assert one.right == other.right


def test_limits_are_applied_and_counted(setting: Setting) -> None:
    text = "x" * 500 + " w00"
    Path(setting.questions).write_text(
        json.dumps({"prompt": text, "answer": "00w"}) + "\n" + json.dumps({"prompt": "w19", "answer": "91w"})
    )
    _, report, metrics = evaluate(setting, generate_max_len=24)
    assert metrics["prompt_truncated/sft"] == 0.5 and report.right["sft"] == 0.5
    with pytest.raises(AssertionError):  # the double sees the engine's length: prompts and answers together
        evaluate(setting, "other", generate_max_len=5)


def test_cut_answers_are_counted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Double.generate
    monkeypatch.setattr(
        Double,
        "generate",
        lambda self, prompts, seeds, how, pictures=(): whole(
            self, prompts, seeds, how._replace(max_new_tokens=5), pictures
        ),
    )
    _, report, metrics = evaluate(setting)
    assert report.truncated == pytest.approx({"sft": 0.5, "dpo": 0.3, "ppo": 0.1})  # "no idea" is cut
    assert report.mean_tokens["sft"] == pytest.approx((10 * 3 + 10 * 5) / 20)
    assert metrics["truncated/sft"] == 0.5


def test_a_reward_model_gives_a_second_opinion(setting: Setting) -> None:
    folder = make_reward_model(setting, "reward_model", seed=0)
    directory, report, metrics = evaluate(setting, judges=(RuleJudge(), RewardJudge()))
    (second,) = TypeAdapter(list[EvalReport]).validate_json(
        (directory / "report/second_opinions.json").read_text()
    )
    assert (report.judge, second.judge) == ("rule", "reward_model")
    assert report.agreement == {"reward_model": metrics["judge_agreement"]}
    assert second.agreement == {"rule": metrics["judge_agreement"]}

    questions = load_questions(Source(path=setting.questions), None, 0)
    renderer = Renderer(load_tokenizer(str(folder)), "chat")
    scorer = RewardScorer(str(folder), "float32", 4)

    def rewards(model: str) -> list[float]:
        given = read_answers(directory / f"report/answers/{model}.jsonl", questions)
        assert given is not None
        return scorer.score(
            [renderer.answer(q.messages, a.text) for q, a in zip(questions, given, strict=True)]
        )

    for rate in second.win_rates:
        better = [
            (ours > theirs) + 0.5 * (ours == theirs)
            for ours, theirs in zip(rewards(rate.model), rewards("sft"), strict=True)
        ]
        assert rate.win_rate == pytest.approx(sum(better) / COUNT)
    lines = (directory / "report/judgments/reward_model.jsonl").read_text().splitlines()
    assert len(lines) == 40 and Judgment.model_validate_json(lines[0]).judge == "reward_model"


def test_the_first_judge_decides(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.inputs["reward_model"] = setting.inputs["sft"]

    class Against:
        """Scores right answers (3 characters) below wrong ones."""

        def __init__(self, *_: Any):
            pass

        def score(self, documents: Sequence[Any]) -> list[float]:
            return [float(len(document.tokens)) for document in documents]

    monkeypatch.setattr("rlhf_core.models.reward_scoring.RewardScorer", Against)
    _, report, metrics = evaluate(setting, judges=(RewardJudge(), RuleJudge()))
    assert report.judge == "reward_model" and metrics["win_rate/ppo"] == pytest.approx(0.3)
    assert metrics["right/ppo"] == pytest.approx(0.9)  # the rule still counts right answers
    assert metrics["judge_agreement"] == pytest.approx(28 / 40)  # they agree on the ties


def test_a_missing_known_answer_is_told_before_any_model_is_asked(setting: Setting) -> None:
    with pytest.raises(ValueError, match="there is no column 'solution'"):
        evaluate(setting, judges=(RuleJudge(answer_key="solution"),))
    assert Double.log == []


def test_a_model_with_too_few_positions_is_refused_before_it_is_loaded(setting: Setting) -> None:
    with pytest.raises(ValueError, match="has 256 positions, and prompt_max_len \\+ generate_max_len = 300"):
        evaluate(setting, prompt_max_len=200, generate_max_len=100)
    assert Double.log == []


def test_a_finished_evaluation_is_not_done_again(setting: Setting) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting))
    result = run_in_directory(directory.path, run)
    assert {"report/eval.json", "report/answers/sft.jsonl", "report/judgments/rule.jsonl"} <= set(
        result.files
    )
    assert result.metrics["questions"] == COUNT
    Double.log.clear()
    assert run_in_directory(directory.path, run) == result and Double.log == []


def test_the_process_tells_the_user_in_one_line(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting, judges=(RuleJudge(answer_key="solution"),)))
    assert main([str(directory.path)], "evaluation") == 2
    told = capsys.readouterr().err
    assert "questions.jsonl, row 1: there is no column 'solution'" in told and told.count("\n") == 1
    (directory / "config.json").write_text("{}")
    assert main([str(directory.path)], "evaluation") == 2
    assert "is no run directory" in capsys.readouterr().err


def test_the_process_succeeds_and_wants_a_run_directory(setting: Setting) -> None:
    directory = RunDir(setting.folder / "run")
    directory.prepare(request(setting))
    assert main([str(directory.path)], "evaluation") == 0 and directory.result() is not None
    command = [sys.executable, "-m", "evaluation", str(setting.folder / "nowhere")]
    process = captured(command, timeout=120, cwd=Path(__file__).parents[3])
    assert process.returncode == 2 and "is no run directory" in process.stderr
