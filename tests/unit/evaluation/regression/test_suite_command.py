"""`alignflow suite`: questions that a model lost in a finished evaluation, and questions that people
reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flows.cli
from evaluation.evaluation_stage import run
from rlhf_core.data.suite import read_suite
from rlhf_core.runs.run_dir import RunDir, run_in_directory
from tests.support.evaluations import SKILL, Setting, make_setting, request


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Setting, Path]:
    """A finished evaluation in which dpo loses the questions 6 to 9 to sft; the working directory is
    empty."""
    setting = make_setting(tmp_path, monkeypatch)
    Path(setting.inputs["dpo"], SKILL).write_text("0.3")
    directory = RunDir(tmp_path / "stages" / "evaluation-0")
    directory.prepare(request(setting))
    run_in_directory(directory.path, run)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return setting, directory.path


def test_lost_questions_are_added_with_the_reason_and_what_is_known(
    evaluated: tuple[Setting, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = evaluated
    assert flows.cli.main(["suite", "add", str(folder), "--model", "dpo"]) == 0
    assert "suite.jsonl: added 4 questions; 0 were already there" in capsys.readouterr().out
    suite = read_suite(Path("suite.jsonl"))
    assert [one.uid for one in suite] == ["q6", "q7", "q8", "q9"]
    first = suite[0]
    assert first.text == "Reverse w06"
    assert first.answer == "60w"
    assert first.reference == "60w"
    assert first.category == "even"
    assert first.reason == "dpo lost both games to sft by rule" and first.source == "evaluation-0"
    assert (
        flows.cli.main(["suite", "add", str(folder), "--model", "dpo", "--lost-to", "sft", "--judge", "rule"])
        == 0
    )
    assert "added 0 questions; 4 were already there" in capsys.readouterr().out


def test_reported_questions_are_added_and_listed(
    evaluated: tuple[Setting, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "What is [b]2 + 2[/b]?", "answer": "4"},
        {"prompt": "Who are you?", "reason": "said it was a person", "uid": "r2"},
    ]
    Path("reported.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        flows.cli.main(
            ["suite", "add", "reported.jsonl", "--reason", "reported by mail", "--suite", "own.jsonl"]
        )
        == 0
    )
    capsys.readouterr()
    assert flows.cli.main(["suite", "list", "own.jsonl"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "reported by mail" in shown and "r2" in shown and "[b]2 + 2[/b]" in shown


def test_wrong_input_is_one_sentence(
    evaluated: tuple[Setting, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = evaluated

    def refused(*arguments: str) -> str:
        assert flows.cli.main(["suite", *arguments]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "give --model, the model whose lost questions to add" in refused("add", str(folder))
    told = refused("add", str(folder), "--model", "kto")
    assert "has no battles of kto against sft; there is dpo against sft, ppo against sft" in told
    assert "there is nothing by a judge gpt" in refused(
        "add", str(folder), "--model", "dpo", "--judge", "gpt"
    )
    assert "is not a run directory" in refused("add", str(folder.parent), "--model", "dpo")
    assert "there is no such file" in refused("list")
    Path("reported.jsonl").write_text('{"prompt": "a"}\n')
    assert "line 1: reason: Field required" in refused("add", "reported.jsonl")
    assert "apply only to an evaluation's directory:" in refused("add", "reported.jsonl", "--model", "dpo")
    (folder / "result.json").unlink()
    assert "holds no finished evaluation" in refused("add", str(folder), "--model", "dpo")
    assert not Path("suite.jsonl").exists()
