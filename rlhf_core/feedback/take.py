"""Writes the inbox rows that a stage trains on to a file, which the stage reads like any other data file.
Torch-free.

The file's name contains its range of row numbers, above `after` and at most `until`. An existing file is not
written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_core.config.data import Rows
from rlhf_core.feedback.feedback_records import Feedback, Kind
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.system.files import digest

FOLDER = "taken"
NO_QUESTIONS = partial(Questions, ())
# the kinds of feedback that a stage can use, by the kind of rows that it needs
VIEWS: Mapping[Rows, tuple[Kind, ...]] = {
    "preference": ("edit", "ranking"),
    "labelled": ("thumb",),
    "sft": ("edit",),
    "prompt": ("thumb", "edit", "ranking"),
}


def take(
    inbox: Inbox,
    rows: Rows,
    after: int,
    until: int,
    questions: Callable[[], Questions] = NO_QUESTIONS,
    key: str = "",
) -> Path:
    """Returns the file with these rows, without rows that match evaluation questions. `questions` is called
    only if the file must be written. `key`: a digest of the questions.

    The columns depend on the kind of rows. preference: prompt, chosen and rejected, for each pair of answers
    with different ranks. labelled: prompt, response and label. sft: the prompt and the person's text. prompt:
    each prompt once.
    """
    file = file_of(inbox, rows, after, until, key)
    if file.is_file():
        return file
    with inbox.changing() as ours:  # so that nobody deletes a person's rows meanwhile
        if not ours:
            raise ValueError(
                f"{inbox.folder}: another process deletes rows of it: try again when it has ended"
            )
        if not file.is_file():
            _write(file, inbox, rows, after, until, questions())
    return file


def _write(file: Path, inbox: Inbox, rows: Rows, after: int, until: int, asked: Questions) -> None:
    file.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("w") as out:
            out.writelines(json.dumps(row) + "\n" for row in _rows(inbox, rows, after, until, asked))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error  # a full disk's error names no file
    finally:
        temporary.unlink(missing_ok=True)


def usable(
    inbox: Inbox,
    rows: Rows,
    after: int,
    questions: Callable[[], Questions] = NO_QUESTIONS,
    most: int | None = None,
) -> int:
    """Returns the number of usable rows of feedback above `after`, not counting rows that match questions.
    Stops counting at `most`."""
    raw = inbox.count(VIEWS[rows], after)
    if raw == 0 or (most is not None and raw < most):
        return raw
    asked = questions()
    kept = (stored for stored in inbox.rows(VIEWS[rows], after) if not _meets(stored.row, asked))
    return sum(1 for _ in islice(kept, most))


def _rows(inbox: Inbox, rows: Rows, after: int, until: int, asked: Questions) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for stored in inbox.rows(VIEWS[rows], after, until):
        if _meets(stored.row, asked):
            continue
        for row in MAKERS[rows](stored.row):
            if rows == "prompt":
                known = digest(row["prompt"])
                if known in seen:
                    continue
                seen.add(known)
            yield {**row, "feedback": stored.seq}


def _meets(row: Feedback, asked: Questions) -> bool:
    return any(asked.met_by(message["content"]) for message in row.prompt if message["role"] == "user")


def file_of(inbox: Inbox, rows: Rows, after: int, until: int, key: str) -> Path:
    """Returns the path of the file that `take` writes."""
    return (
        inbox.folder
        / FOLDER
        / f"{rows}-{after}-{until}-{inbox.id[:8]}{f'-{digest(key)[:8]}' if key else ''}.jsonl"
    )


def _pairs(row: Feedback) -> Iterator[dict[str, Any]]:
    for i, (chosen, better) in enumerate(zip(row.answers, row.ranks, strict=True)):
        for j, (rejected, worse) in enumerate(zip(row.answers, row.ranks, strict=True)):
            if i != j and better < worse:
                yield {"prompt": row.prompt, "chosen": chosen, "rejected": rejected}


def _labelled(row: Feedback) -> Iterator[dict[str, Any]]:
    yield {"prompt": row.prompt, "response": row.answers[0], "label": bool(row.ranks[0])}


def _edited(row: Feedback) -> Iterator[dict[str, Any]]:
    yield {"prompt": row.prompt, "response": row.answers[1]}


def _prompt(row: Feedback) -> Iterator[dict[str, Any]]:
    yield {"prompt": row.prompt}


MAKERS: Mapping[Rows, Callable[[Feedback], Iterator[dict[str, Any]]]] = {
    "preference": _pairs,
    "labelled": _labelled,
    "sft": _edited,
    "prompt": _prompt,
}
