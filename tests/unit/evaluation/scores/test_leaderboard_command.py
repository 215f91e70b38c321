"""`alignflow leaderboard`: a folder of judgments in, a table and JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import main

BASELINE = "o3-mini-2025-01-31"
WON = ("B>A", "A>>B")
LOST = ("A>B", "B>A")


def write(folder: Path, category: str = "hard_prompt") -> Path:
    """Two models on 20 questions: `good` wins 15, `bad` wins 5; good's answers are longer where it wins."""
    for model, wins in (("good", 15), ("bad", 5)):
        rows = []
        for q in range(20):
            games = [
                {"score": score, "judgment": {"answer": "so"}, "prompt": []}
                for score in (WON if q < wins else LOST)
            ]
            rows.append(
                {
                    "uid": f"q{q}",
                    "category": category,
                    "judge": "gpt-4.1",
                    "model": model,
                    "baseline": BASELINE,
                    "games": games,
                }
            )
        put(folder / "model_judgment" / "gpt-4.1" / f"{model}.jsonl", rows)
    for model in ("good", "bad", BASELINE):
        counts = {"header_count": {"h1": 0}, "list_count": {"ordered": 1}, "bold_count": {"**": 2}}
        answers = []
        for q in range(20):
            tokens = 60 + 3 * q if model == BASELINE else 70 + (q * 7) % 20
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": {"answer": "x"}}]
            answers.append(
                dict(uid=f"q{q}", model=model, messages=messages, metadata={"token_len": tokens, **counts})
            )
        put(folder / "model_answer" / f"{model}.jsonl", answers)
    return folder


def put(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_board_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "arena-hard-v2.0")
    assert main(["leaderboard", str(folder), "--rounds", "200", "--json", str(tmp_path / "board.json")]) == 0
    told = capsys.readouterr().out
    (ours,) = json.loads((tmp_path / "board.json").read_text())
    assert (ours["judge"], ours["baseline"]) == ("gpt-4.1", BASELINE)
    good, bad = ours["standings"]
    # Rows of good: 15 x (1 + 3) won, 5 x 2 lost.
    assert good["model"] == "good"
    assert good["score"]["value"] == pytest.approx(60 / 70)
    assert bad["score"]["value"] == pytest.approx(20 / 50)
    assert good["score"]["low"] < 60 / 70 < good["score"]["high"] and good["controlled"] is not None
    assert set(ours["effects"]) == {"length", "headers", "lists", "bold"}
    assert "85.7" in told and "style effects" in told
    assert told.index("good") < told.index("bad")


@pytest.mark.parametrize("inside", ["", "model_judgment", "model_judgment/gpt-4.1"])
def test_any_of_the_folders_will_do(inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["leaderboard", str(write(tmp_path / "bench") / inside), "--rounds", "50", "--control", "length"]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "length" in told and "bold" not in told and "no style control" not in told


def test_judgments_alone_are_scored_without_style(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (write(tmp_path / "bench") / "model_judgment").rename(tmp_path / "alone")
    assert main(["leaderboard", str(tmp_path / "alone"), "--rounds", "50"]) == 0
    assert "no style control" in capsys.readouterr().out
    assert (
        main(
            [
                "leaderboard",
                str(tmp_path / "alone"),
                "--rounds",
                "50",
                "--answers",
                str(tmp_path / "bench" / "model_answer"),
            ]
        )
        == 0
    )
    assert "style effects" in capsys.readouterr().out


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "bench")
    assert main(["leaderboard", str(folder), "--category", "poetry"]) == 2
    assert "no judgments of the categories poetry" in capsys.readouterr().err
    file = folder / "model_judgment" / "gpt-4.1" / "good.jsonl"
    file.write_text(file.read_text().replace('"B>A"', "null").replace('"A>>B"', '"[A]"'))
    assert main(["leaderboard", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "games have no verdict, more than --max-failed 0.02 allows" in told and told.count("\n") == 1
    assert main(["leaderboard", str(folder), "--max-failed", "1"]) == 0
    for words, sentence in (
        (["--rounds", "0"], "give 1 or more rounds"),
        (["--seed", "-1"], "a seed of 0 or more"),
        (["--json", str(tmp_path / "none" / "x.json")], "does not exist"),
        (["--answers", str(tmp_path / "none")], "give the folder with the answers as --answers"),
    ):
        capsys.readouterr()
        assert main(["leaderboard", str(folder), "--max-failed", "1", *words]) == 2
        told = capsys.readouterr().err
        assert sentence in told and told.count("\n") == 1
    answers = folder / "model_answer" / "good.jsonl"
    answers.write_text(answers.read_text().replace('{"answer": "x"}', "null", 1))  # a request that failed
    assert main(["leaderboard", str(folder), "--max-failed", "1"]) == 0
    answers.write_bytes("{}\n".encode("utf-16"))
    assert main(["leaderboard", str(folder), "--max-failed", "1"]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err
