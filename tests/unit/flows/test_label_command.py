"""`alignflow label --agreement`: the table of a file of labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.labelling.store import LabelFile
from flows.cli.app import main
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
