"""`alignflow label --agreement`: the table of a file of labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.labelling.label_store import LabelFile
from flows.cli.app import main
from rlhf_core.data.labels import load_labels
from tests.support.labelling import rated, row


def test_the_agreement_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    ann = [n % 3 for n in range(30)]
    for label in rated([ann, [2 if n < 6 else rating for n, rating in enumerate(ann)]], ["Ann", "[red]Bob"]):
        file.append(label)
    file.append(row(id="again", uid="q2", annotator="Ann", verdict="B>A", shown_first="b", repeat_of="Ann2"))
    assert main(["label", "--agreement", str(tmp_path / "labels.jsonl")]) == 0
    told = capsys.readouterr().out
    assert "30 pairs have a verdict, 30 of them by two or more annotators" in told
    line = next(line for line in told.splitlines() if line.startswith("Ann, [red]Bob"))
    assert line.split()[2:5] == ["30", "87", "%"] and " 0.80 (" in line
    line = next(line for line in told.splitlines() if line.startswith("Ann "))
    assert line.split()[:5] == ["Ann", "30", "0", "33", "%"] and "100 %" in line


def test_names_send_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    for label in rated([[0, 2, 1], [0, 2, 0]], ["\x1b]0;title\x07Ann", "\x9b31mBob\u202e"]):
        file.append(label)
    assert main(["label", "--agreement", str(tmp_path / "labels.jsonl")]) == 0
    told = capsys.readouterr().out
    assert "Ann" in told and "Bob" in told and not set(told) & set("\x1b\x07\x9b\u202e")


def test_a_file_that_a_calibration_reads_has_an_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(number: int, annotator: str, verdict: str, **changes: Any) -> str:
        prompt = [{"role": "user", "content": "Copy this number: 41"}]
        own = dict(id=f"{annotator}{number}", uid=f"q{number}", prompt=prompt, answer_a="41", answer_b="No.")
        return (
            json.dumps(
                own
                | {"verdict": verdict, "annotator": annotator, "repeat_of": None, "undone": None}
                | changes
            )
            + "\n"
        )

    file = tmp_path / "labels.jsonl"
    lines = [line(n, "ann", "A>B") + line(n, "bo", "A=B" if n < 3 else "A>B") for n in range(20)]
    # the same winner, the other way round
    lines += line(20, "ann", "A>>B"), line(20, "bo", "B>A", answer_a="No.", answer_b="41")
    lines += line(21, "ann", "B>A"), '{"id": "taken", "undone": "ann21"}\n'
    file.write_text("".join(lines) + '{"id": "cut by a cra')
    assert len(load_labels(file)) == 21
    assert main(["label", "--agreement", str(file)]) == 0
    told = capsys.readouterr().out
    assert "21 pairs have a verdict, 21 of them by two or more annotators" in told
    both = next(line for line in told.splitlines() if line.startswith("ann, bo"))
    assert both.split()[2:5] == ["21", "86", "%"]
    alone = next(line for line in told.splitlines() if line.startswith("ann "))
    # no side and no time is known
    assert alone.split()[:5] == ["ann", "21", "0", "0", "%"] and alone.rstrip().endswith("–")
    file.write_text(line(1, "ann", "A>>>B"))
    assert main(["label", "--agreement", str(file)]) != 0
    assert "line 1: verdict is 'A>>>B'" in capsys.readouterr().err
