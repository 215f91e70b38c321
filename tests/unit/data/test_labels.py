"""People's labels of pairs: votes, what takes them back, repetitions, and every fault of a file in one
message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.labels import LabelledPair, load_labels
from tests.support.labels import label, write_labels


def load(folder: Path, *rows: dict[str, Any], **settings: Any) -> list[LabelledPair]:
    return load_labels(write_labels(folder / "labels.jsonl", *rows), **settings)


def test_a_pair_has_the_sign_that_most_annotators_gave(tmp_path: Path) -> None:
    def sign(*verdicts: str) -> int:
        (pair,) = load(
            tmp_path, *(label(i, verdict, annotator=f"p{i}") for i, verdict in enumerate(verdicts))
        )
        return pair.sign

    assert [sign("A>>B"), sign("A>B"), sign("A=B"), sign("B>A"), sign("B>>A")] == [1, 1, 0, -1, -1]
    assert sign("A>B", "A>>B", "B>A") == 1 and sign("A>B", "B>A") == 0 and sign("B>A", "A=B") == 0
    assert sign("A>B", "A=B", "A=B") == 0 and sign("A>B", "A>B", "B>A", "B>A", "A=B") == 0


def test_a_line_may_have_the_answers_the_other_way_round(tmp_path: Path) -> None:
    turned = label(2, "A>B", annotator="bo", answer_a="b of q1", answer_b="a of q1")
    (pair,) = load(tmp_path, label(1, "B>A"), turned)
    assert pair.votes == {"ann": -1, "bo": -1} and (pair.answer_a, pair.answer_b) == ("a of q1", "b of q1")


def test_skipped_and_taken_back_labels_do_not_count_and_a_later_one_replaces(tmp_path: Path) -> None:
    rows = [
        label(1, None),
        label(2, "A>B", uid="q2"),
        {"id": "l3", "undone": "l2"},
        label(4, "B>A", uid="q3"),
        label(5, "A>B", uid="q3"),
    ]
    (pair,) = load(tmp_path, *rows)
    assert (pair.uid, pair.votes) == ("q3", {"ann": 1})
    assert [pair.uid for pair in load(tmp_path, *rows, label(6, uid="q2"))] == ["q3", "q2"]


def test_a_repetition_is_no_second_vote(tmp_path: Path) -> None:
    (pair,) = load(
        tmp_path, label(1, "A>B"), label(2, "B>A", repeat_of="l1"), label(3, "A>>B", repeat_of="l1")
    )
    assert pair.votes == {"ann": 1} and pair.repeats == ((1, -1), (1, 1))
    (pair,) = load(tmp_path, label(1, "A>B"), label(2, "B>A", repeat_of="l1"), {"id": "l3", "undone": "l1"})
    assert pair.votes == {"ann": -1} and pair.repeats == ()  # of a label that does not count


def test_pairs_of_one_question_share_its_uid_and_have_keys_of_their_own(tmp_path: Path) -> None:
    pairs = load(tmp_path, label(1), label(2, answer_b="another"), label(3, uid="q2"))
    assert [(pair.uid, pair.key) for pair in pairs] == [("q1", "q1#1"), ("q1", "q1#2"), ("q2", "q2")]


def test_the_pairs_that_were_labelled_last_are_kept(tmp_path: Path) -> None:
    rows = [label(1, uid="q1"), label(2, uid="q2"), label(3, uid="q3"), label(4, uid="q1", annotator="bo")]
    assert [pair.uid for pair in load(tmp_path, *rows, max_labels=2)] == ["q3", "q1"]


def test_all_faults_of_a_file_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    without = label(4)
    del without["verdict"]
    rows: list[Any] = [
        label(1),
        label(1),
        label(3, "A>>>B"),
        without,
        label(5, prompt=[]),
        label(6, answer_a=None),
        [1],
    ]
    text = (
        "".join(json.dumps(row) + "\n" for row in rows).encode()
        + b"{\n\xff\n"
        + json.dumps(label(9, note="\ud800")).encode()
        + b"\n"
    )
    file.write_bytes(text)
    with pytest.raises(ValueError) as error:
        load_labels(file)
    told = str(error.value)
    assert told.startswith(f"{file}: correct or remove these lines: ")
    for part in (
        "line 2: has the id 'l1' of line 1: give each label an id of its own",
        "line 3: verdict is 'A>>>B' (one of A>>B, A>B, A=B, B>A, B>>A, or null)",
        "line 4: verdict is missing",
        "line 5: column 'prompt' must be a string or a list of messages, found an empty list",
        "line 6: answer_a is 'None'",
        "line 7: is not a JSON object",
        "line 8: is not JSON in UTF-8",
        "line 9: is not JSON in UTF-8",
        "line 10: is not JSON in UTF-8",
    ):
        assert part in told, part
    assert re.findall(r"[:;] line (\d+): ", told) == [str(n) for n in range(2, 11)]


def test_names_of_labels_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="line 2: takes back the label 'l9', which is not here; line 3: repeats the label 'l8'",
    ):
        load(tmp_path, label(1), {"id": "l2", "undone": "l9"}, label(3, repeat_of="l8"))


def test_many_faults_are_cut_and_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"and 30 lines more$"):
        load(tmp_path, *(label(i, "C>A") for i in range(50)))


def test_a_file_without_a_label_that_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no label that counts"):
        load(tmp_path, label(1, None))
    with pytest.raises(ValueError, match="there is no such file"):
        load_labels(tmp_path / "none.jsonl")
