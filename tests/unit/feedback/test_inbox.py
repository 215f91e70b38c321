"""The inbox's rows: added once, in order, by several processes, killed at any time; deleted for good."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.feedback.feedback_records import Feedback
from rlhf_core.feedback.inbox import FILE, Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.parse import feedback_of
from rlhf_core.feedback.receive import ReceivedRow, receive, rows_of
from rlhf_core.feedback.take import take
from rlhf_core.system.processes import module_path

ALL = ("thumb", "edit", "ranking")


def thumb(number: int = 0, up: bool = True, annotator: str | None = "ann", **more: Any) -> Feedback:
    return feedback_of(
        {"prompt": f"question {number}", "response": "answer", "label": up, "annotator": annotator, **more}
    )


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "a.inbox")


def test_a_folder_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends with \.inbox"):
        Inbox(tmp_path / "a")


def test_an_inbox_without_rows_reads_as_empty_and_makes_no_folder(inbox: Inbox) -> None:
    assert inbox.end() == 0
    assert inbox.count(ALL) == 0
    assert list(inbox.rows(ALL)) == []
    assert inbox.contradictions() == 0
    assert inbox.delete("x") == []
    assert not inbox.folder.exists()


def test_rows_keep_their_order_and_duplicates_are_left_out(inbox: Inbox) -> None:
    assert inbox.add([thumb(1), thumb(2), thumb(1)]) == (2, 1)
    assert inbox.add([thumb(2), thumb(3), thumb(1, annotator="bob")]) == (2, 1)
    assert [stored.row.prompt[0]["content"] for stored in inbox.rows(ALL)] == [
        "question 1",
        "question 2",
        "question 3",
        "question 1",
    ]
    end = inbox.end()
    inbox.add([thumb(4)])
    assert [stored.row for stored in inbox.rows(ALL, after=end)] == [thumb(4)] and inbox.count(ALL, end) == 1
    assert [stored.row for stored in inbox.rows(ALL, 0, end)] == [
        thumb(1),
        thumb(2),
        thumb(3),
        thumb(1, annotator="bob"),
    ]


def test_rows_of_nobody_are_apart_by_their_time(inbox: Inbox) -> None:
    rows = [thumb(1, annotator=None, at=f"2026-01-0{day}") for day in (1, 2, 2)]
    assert inbox.add(rows) == (2, 1)


def test_contradictions_are_counted_once_for_each_thing_judged(inbox: Inbox) -> None:
    rankings = [
        {"ranking": ["a", "b"]},
        {"ranking": ["b", "a"]},
        {"ranking": ["a", "c"]},
        {"chosen": "a", "rejected": "b"},
    ]
    inbox.add([thumb(1), thumb(1, up=False, annotator="bob"), thumb(2), thumb(2, annotator="bob")])
    inbox.add([feedback_of({"prompt": "q", "annotator": f"p{i}", **row}) for i, row in enumerate(rankings)])
    inbox.add(
        [feedback_of({"prompt": "q", "response": "a", "edited": text}) for text in ("one way", "another")]
    )
    assert inbox.contradictions() == 2


def test_a_person_is_deleted_from_the_file_and_does_not_come_back(inbox: Inbox) -> None:
    mine = [thumb(number, annotator="ann", model="secret-model-name") for number in range(200)]
    inbox.add([*mine, thumb(1, annotator="bob")])
    assert inbox.delete("ann") == list(range(1, 201))
    assert inbox.delete("ann") == []
    assert b"secret-model-name" not in b"".join(file.read_bytes() for file in inbox.folder.iterdir())
    assert inbox.add(mine) == (0, 200)  # known by their tombstones
    assert dict(inbox.kinds()) == {"deleted": 200, "thumb": 1}


def test_a_damaged_file_is_a_sentence(inbox: Inbox) -> None:
    inbox.folder.mkdir()
    (inbox.folder / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(ValueError, match="restore it from a copy"):
        inbox.add([thumb()])


def fill(folder: Path, person: str) -> None:
    for number in range(40):
        Inbox(folder).add([thumb(number, annotator=person), thumb(number, annotator="both")])


def test_processes_add_rows_side_by_side(inbox: Inbox) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=fill, args=(inbox.folder, f"p{i}")) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert inbox.count(ALL) == 3 * 40 + 40


def test_an_import_killed_at_any_time_goes_on_without_loss_or_repetition(
    inbox: Inbox, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "response": "a", "thumb": "up"}) + "\n" for i in range(20_000))
    )
    code = "import sys; from flows.cli import main; sys.exit(main(['feedback', 'import', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, str(file), "--inbox", str(inbox.folder)]
    killed = subprocess.Popen(
        command, env=os.environ | module_path(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while inbox.count(ALL) == 0 and killed.poll() is None:
        pass
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    begun = inbox.count(ALL)
    assert 0 < begun and begun % 2000 == 0  # whole batches
    done = receive(inbox, rows_of(str(file)), Questions(()))
    assert (done.new, done.duplicate, inbox.count(ALL)) == (20_000 - begun, begun, 20_000)


def test_a_file_is_read_line_by_line_with_its_faults_and_labels_taken_back(
    inbox: Inbox, tmp_path: Path
) -> None:
    label = {"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": "A>B", "annotator": "ann"}
    lines = [
        json.dumps(label | {"id": "1"}),
        json.dumps(label | {"id": "2", "answer_b": "c"}),
        "",
        "{broken",
        '{"prompt": "\\ud800", "response": "a", "thumb": "up"}',
        json.dumps({"id": "3", "undone": "1", "verdict": None}),
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    done = receive(inbox, rows_of(str(tmp_path / "labels.jsonl")), Questions(()), "page")
    assert (done.read, done.new, done.wrong, sum(done.unusable.values())) == (4, 1, 2, 1)
    assert [fault.rpartition("labels.jsonl, ")[2] for fault in done.faults] == [
        "line 4: is not JSON in UTF-8",
        "line 5: is not JSON in UTF-8",
    ]
    assert [(stored.row.answers, stored.row.source) for stored in inbox.rows(ALL)] == [(("a", "c"), "page")]


def test_what_stages_read(inbox: Inbox) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "one", "response": "a", "thumb": "up"},
        {"prompt": "one", "response": "b", "edited": "c"},
        {"prompt": "two", "ranking": ["a", ["b", "c"]]},
        {"prompt": "evaluation question of many words", "response": "a", "thumb": "down"},
    ]
    inbox.add([feedback_of(row) for row in rows])

    def read(rows: Any, after: int = 0, until: int = 4) -> list[dict[str, Any]]:
        file = take(
            inbox, rows, after, until, lambda: Questions(["Evaluation question, of many words?"]), "key"
        )
        return [
            {**json.loads(line), "prompt": json.loads(line)["prompt"][0]["content"]}
            for line in file.read_text().splitlines()
        ]

    assert read("labelled") == [{"prompt": "one", "response": "a", "label": True, "feedback": 1}]
    assert read("sft") == [{"prompt": "one", "response": "c", "feedback": 2}]
    assert [row["prompt"] for row in read("prompt")] == ["one", "two"]
    assert [(row["chosen"], row["rejected"]) for row in read("preference")] == [
        ("c", "b"),
        ("a", "b"),
        ("a", "c"),
    ]
    assert read("preference", after=2) == read("preference")[1:] and read("preference", until=1) == []


def test_rows_that_meet_questions_or_judge_nothing_are_counted(inbox: Inbox) -> None:
    rows = [
        {"prompt": "what is the capital of France", "response": "a", "thumb": "up"},
        {"prompt": "x", "response": "y"},
        5,
    ]
    done = receive(
        inbox,
        [ReceivedRow(f"row {i}", row) for i, row in enumerate(rows)],
        Questions(["What is the capital of France?"]),
    )
    assert (done.read, done.new, done.leaked, done.wrong, len(done.unusable)) == (3, 0, 1, 1, 1)


def test_a_file_of_rows_that_a_full_disk_cuts_off_is_removed(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive(
        inbox, [ReceivedRow("row 1", {"prompt": "hello", "response": "hi", "thumb": "up"})], Questions([])
    )

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as raised:
            take(inbox, "labelled", 0, inbox.end())
    assert not [file for file in inbox.folder.rglob("*") if ".jsonl" in file.name]
    assert raised.value.filename == str(take(inbox, "labelled", 0, inbox.end()))
