"""Which rows a file gives, and how many make one transaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.feedback import receive as receiving
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import ReceivedRow, receive, rows_of

LABEL = {"prompt": "q", "answer_a": "a", "answer_b": "b", "verdict": "A>B"}


@pytest.mark.parametrize("undone", [[], ["1"], {}, {"a": 1}, 5, True])
def test_ids_of_other_types_take_nothing_back(undone: Any, tmp_path: Path) -> None:
    rows = [
        LABEL | {"id": "1"},
        LABEL | {"id": ["1"]},
        {"undone": undone},
        LABEL | {"id": "2"},
        {"undone": "2"},
    ]
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [given.row for given in rows_of(str(file)) if "verdict" in given.row] == rows[:2]


def test_a_batch_ends_after_its_rows_or_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BATCH", 4)
    monkeypatch.setattr(receiving, "BATCH_BYTES", 100)
    sizes: list[int] = []
    inbox = Inbox(tmp_path / "chat.inbox")
    add = inbox.add
    monkeypatch.setattr(inbox, "add", lambda rows: sizes.append(len(rows)) or add(rows))
    row = {"prompt": "q", "response": "a", "thumb": "up"}
    given = [ReceivedRow(str(n), row | {"prompt": str(n)}, size=1 if n < 5 else 50) for n in range(9)]
    assert receive(inbox, given, Questions(())).new == 9
    assert sizes == [4, 3, 2]  # four rows; 1 + 50 + 50 bytes; the rest


def test_rows_of_a_file_know_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"b": 22}\n')
    assert [given.size for given in rows_of(str(tmp_path / "rows.jsonl"))] == [9, 10]
