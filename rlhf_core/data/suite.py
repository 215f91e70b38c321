"""Reads and extends a regression suite: questions that a model lost or a person reported, one JSON object per
line. Lines are only added. Torch-free.

{"uid", "prompt": text or [messages], "reason", "added": ISO time, "source", "category", and, if known,
"answer" (the correct answer, for a rule judge) and "reference" (a good answer, for people)}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from rlhf_core.data.documents import Message, as_text
from rlhf_core.data.rows.columns import Located, prompt_of
from rlhf_core.records import Frozen
from rlhf_core.system.files import digest, locked, write_text

WAIT_SECONDS = 30.0  # time to wait for another process that adds questions


class SuiteQuestion(Frozen):
    """Holds a question of a suite and the reason for including it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str = ""
    prompt: str | tuple[dict[str, Any], ...]
    reason: str = Field(min_length=1)
    added: str = ""
    source: str = ""
    category: str = "all"
    answer: str | None = None
    reference: str | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(
            prompt_of(
                Located(
                    f"question {self.uid}",
                    {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)},
                )
            )
        )

    @property
    def text(self) -> str:
        """Returns the prompt as one string."""
        return as_text(self.messages)


def read_suite(file: Path, reason: str = "") -> list[SuiteQuestion]:
    """Returns the questions in a file. A question without a uid gets the digest of its prompt. `reason`
    applies to questions without one.

    Raises ValueError for a missing file, or with all faults of the file and their lines.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file: give a file of questions (.jsonl)")
    questions = list[SuiteQuestion]()
    faults = list[str]()
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict):
                raise ValueError("is not a JSON object")
            given = {name: value for name, value in row.items() if value is not None}
            question = SuiteQuestion.model_validate(({"reason": reason} if reason else {}) | given)
            messages = question.messages  # raises ValueError for images
            uid = question.uid or digest(list(messages))
            json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
            questions.append(question.model_copy(update={"uid": uid}))
        except ValidationError as error:
            faults.append(
                f"line {number}: "
                + ", ".join(f"{'.'.join(map(str, one['loc'][:1]))}: {one['msg']}" for one in error.errors())
            )
        except (ValueError, RecursionError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        raise ValueError(f"{file}: correct or remove these lines: " + "; ".join(dict.fromkeys(faults)))
    return questions


def add_to_suite(suite: Path, questions: Iterable[SuiteQuestion]) -> list[SuiteQuestion]:
    """Adds the questions whose prompt is not yet in the suite, with the current time, and returns them. A
    question whose uid belongs to another prompt gets a longer uid.

    Replaces the whole file, keeping its earlier lines unchanged. Raises ValueError for an invalid suite, and
    TimeoutError if another process holds it for 30 seconds.
    """
    suite.parent.mkdir(parents=True, exist_ok=True)
    with locked(suite.with_name(f".{suite.name}.lock"), WAIT_SECONDS) as ours:
        if not ours:
            raise TimeoutError(
                f"another process has been adding questions to {suite} for {WAIT_SECONDS:.0f} s: try again"
            )
        known = read_suite(suite) if suite.exists() else []
        uids = {one.uid for one in known}
        texts = {one.text for one in known}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        added = list[SuiteQuestion]()
        for question in questions:
            if question.text in texts:
                continue
            uid = (
                f"{question.uid}-{digest(list(question.messages))[:8]}"
                if question.uid in uids
                else question.uid
            )
            uids.add(uid)
            texts.add(question.text)
            added.append(question.model_copy(update={"uid": uid, "added": now}))
        before = suite.read_text(encoding="utf-8") if suite.exists() else ""
        before += "\n" if before and not before.endswith("\n") else ""
        if added:
            write_text(suite, before + lines(added))
    return added


def lines(questions: Sequence[SuiteQuestion]) -> str:
    """Returns questions as JSON lines."""
    return "".join(question.model_dump_json(exclude_none=True) + "\n" for question in questions)
