"""Writes the rows of an inbox that a stage trains on to a file, which the stage reads as any other data file. Torch-free.

The file's name says which rows it has: numbers above `after`, not above `until`. A file that is there is not written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config.data import Rows
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.records import Feedback, Kind
from rlhf_core.system.files import digest

FOLDER = "taken"
NO_QUESTIONS = partial(Questions, ())
VIEWS: Mapping[Rows, tuple[Kind, ...]] = {  # what a stage's rows must hold: the kinds of feedback that it can use
    "preference": ("edit", "ranking"),
    "labelled": ("thumb",),
    "sft": ("edit",),
    "prompt": ("thumb", "edit", "ranking"),
}


def take(inbox: Inbox, rows: Rows, after: int, until: int, questions: Callable[[], Questions] = NO_QUESTIONS, key: str = "") -> Path:
    """Returns the file of these rows, without those that meet evaluation questions, which are asked for when it must be written; `key`: a
    digest of the questions.

    preference: prompt, chosen, rejected for each two answers of different rank; labelled: prompt, response, label; sft: prompt and the
    person's text; prompt: each prompt once.
    """
    file = file_of(inbox, rows, after, until, key)
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    seen, asked = set[str](), questions()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w") as out:
        for stored in inbox.rows(VIEWS[rows], after, until):
            if any(asked.met_by(message["content"]) for message in stored.row.prompt if message["role"] == "user"):
                continue
            for row in MAKERS[rows](stored.row):
                if rows == "prompt":
                    if (known := digest(row["prompt"])) in seen:
                        continue
                    seen.add(known)
                out.write(json.dumps({**row, "feedback": stored.seq}) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    return file


def file_of(inbox: Inbox, rows: Rows, after: int, until: int, key: str) -> Path:
    """Returns the path of the file that `take` writes."""
    return inbox.folder / FOLDER / f"{rows}-{after}-{until}{f'-{digest(key)[:8]}' if key else ''}.jsonl"


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
