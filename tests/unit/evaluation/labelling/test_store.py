"""The labels file: kills at every byte, failing disks, files that are not ours, one process at a time."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.labelling.label_records import HumanLabel, in_force
from evaluation.labelling.label_store import LabelFile, opened, read_labels
from rlhf_core.system.machine import MachineLacks
from tests.support.labelling import row

LABELS = [
    row(id="1", answer_a="line\nbreak  and \x00", note="ü 漢字 \U0001f600"),
    row(id="2", verdict=None, seconds=0.0),
    row(id="3", undone="1", verdict=None),
]


def test_a_kill_at_every_byte_loses_no_whole_line_and_leaves_none_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.jsonl"
    file = LabelFile(whole)
    for label in LABELS:
        file.append(label)
    file.close()
    content = whole.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == len(LABELS), "line breaks in texts are escaped"
    # the disk is not what is killed here, and a thousand syncs take long
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for length in range(len(content) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(content[:length])
        kept = LABELS[: sum(end <= length for end in ends)]
        assert read_labels(cut) == kept
        again = LabelFile(cut)
        assert again.labels == kept
        again.append(row(id="new"))
        again.close()
        assert read_labels(cut) == [*kept, row(id="new")]
        assert len(cut.read_bytes().splitlines()) == len(kept) + 1


def test_zeros_that_a_power_failure_leaves_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_bytes(LABELS[0].model_dump_json().encode() + b"\n" + b'{"uid":"q' + b"\0" * 100)
    LabelFile(path).close()
    assert path.read_bytes() == LABELS[0].model_dump_json().encode() + b"\n"


def test_each_line_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "labels.jsonl"
    file = LabelFile(path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    for label in LABELS:
        file.append(label)
    assert len(synced) == len(LABELS) and synced[-1] == path.stat().st_size


def failing(call: Callable[..., Any], after: int, number: int) -> Callable[..., Any]:
    """Returns a call of the system that fails from its call number `after` on."""
    calls: list[int] = []

    def called(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return call(*given)

    return called


@pytest.mark.parametrize("fails", ["first write", "second write", "sync", "cut"])
def test_a_label_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "labels.jsonl"
    write = os.write
    file = LabelFile(path)
    file.append(LABELS[0])
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        if fails == "sync":
            patch.setattr(os, "fsync", failing(os.fsync, 0, errno.EIO))
        else:
            part = failing(
                lambda handle, content: write(handle, content[:40]),
                0 if fails == "first write" else 1,
                errno.ENOSPC,
            )
            patch.setattr(os, "write", part)
        if fails == "cut":  # the part that was written cannot be removed at once either
            patch.setattr(os, "ftruncate", failing(os.ftruncate, 1, errno.EIO))
        with pytest.raises(OSError, match=r"No space left|Input/output"):
            file.append(LABELS[1])
    assert file.labels == LABELS[:1] and (fails == "cut") == (path.stat().st_size > size)
    file.append(LABELS[2])
    file.close()
    assert read_labels(path) == [LABELS[0], LABELS[2]]


def test_a_file_that_is_moved_away_takes_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    file = LabelFile(path)
    file.append(LABELS[0])
    path.rename(tmp_path / "moved.jsonl")
    with pytest.raises(OSError, match="moved, removed or replaced"):
        file.append(LABELS[1])
    path.write_text("")
    with pytest.raises(OSError, match="moved, removed or replaced"):
        file.append(LABELS[1])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"notes of mine", "the last line is not a label"),
        (b'{"prompt": "2 + 2", "chosen": "4", "rejected": "5"}\n', "line 1: is not a label"),
        (LABELS[0].model_dump_json().encode() + b"\nnotes\n", "line 2: is not a label"),
        (
            LABELS[0].model_dump_json().replace("A>B", "A>C").encode() + b"\n",
            r"line 1: is not a label \(verdict",
        ),
        (b"\xff\xfe\n", "line 1: is not a label"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_bytes(content)
    for use in (read_labels, LabelFile):
        with pytest.raises(ValueError, match=told):
            use(path)
    assert path.read_bytes() == content


def test_other_users_cannot_read_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        LabelFile(tmp_path / "labels.jsonl").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "labels.jsonl").stat().st_mode) == 0o600


def test_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    with opened(path) as file:
        file.append(LABELS[0])
        with (
            pytest.raises(MachineLacks, match="another `alignflow label` is writing to this file:"),
            opened(path),
        ):
            pass
    with opened(path) as file:
        assert file.labels == LABELS[:1]
    with (
        pytest.raises(ValueError, match="does not exist: create it"),
        opened(tmp_path / "none" / "labels.jsonl"),
    ):
        pass
    with pytest.raises(ValueError, match="is not a file"), opened(tmp_path):
        pass
    with pytest.raises(ValueError, match="this file does not exist"):
        read_labels(tmp_path / "none.jsonl")


def test_labels_that_were_taken_back_are_not_in_force() -> None:
    assert in_force(LABELS) == [LABELS[1]]


def test_a_line_has_the_documented_fields() -> None:
    fields = {
        "id",
        "uid",
        "prompt",
        "answer_a",
        "answer_b",
        "model_a",
        "model_b",
        "verdict",
        "shown_first",
        "annotator",
        "at",
        "seconds",
    }
    line = json.loads(row().model_dump_json())
    assert line.keys() == fields | {"note", "source", "repeat_of", "undone"}
    assert (
        HumanLabel(**line).key
        == row().key
        == row(id="2", verdict=None, annotator="Bob", source="elsewhere").key
    )
    assert row(answer_a="x").key != row().key
