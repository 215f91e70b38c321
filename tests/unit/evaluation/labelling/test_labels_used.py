"""What the labelling page writes is what a calibration and the feedback inbox read."""

from __future__ import annotations

from pathlib import Path

from evaluation.labelling.label_store import LabelFile
from rlhf_core.data.labels import load_labels
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import receive, rows_of
from tests.support.labelling import row


def test_labels_of_the_page_calibrate_a_judge_and_become_rankings(tmp_path: Path) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    about = {"answer_a": "good", "answer_b": "bad"}
    for label in (
        row(id="1", uid="q1", verdict="A>B", annotator="ann", **about),
        row(id="2", uid="q1", verdict="B>A", annotator="bob", **about),
        row(id="3", undone="2", verdict=None, annotator="bob", uid="q1", **about),
        row(id="4", uid="q1", verdict="A>>B", annotator="ann", repeat_of="1", **about),
        row(id="5", uid="q2", verdict=None, annotator="ann", answer_a="x", answer_b="y"),
        row(id="6", uid="q3", verdict="A=B", annotator="ann", answer_a="x", answer_b="z"),
    ):
        file.append(label)
    file.close()
    pairs = load_labels(tmp_path / "labels.jsonl")
    assert [(pair.uid, pair.answer_a, pair.votes) for pair in pairs] == [
        ("q1", "good", {"ann": 1}),
        ("q3", "x", {"ann": 0}),
    ]
    inbox = Inbox(tmp_path / "a.inbox")
    done = receive(inbox, rows_of(str(tmp_path / "labels.jsonl")), Questions(()))
    assert (done.wrong, done.new, done.duplicate) == (0, 1, 1)  # the second showing says the same
    (stored,) = inbox.rows(("ranking",))
    assert (stored.row.answers, stored.row.ranks, stored.row.annotator) == (("good", "bad"), (0, 1), "ann")
