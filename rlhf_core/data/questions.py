"""Loads the questions of an evaluation: our rows, Arena-Hard v2.0's {uid, category, prompt} and v0.1's {question_id, category, turns}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import Data, Source
from rlhf_core.data.columns import Located, prompt_of
from rlhf_core.data.documents import Message, as_text
from rlhf_core.data.rows import load_rows
from rlhf_core.system.files import digest


@dataclass(frozen=True)
class Question:
    """A prompt as chat messages. `row` is the whole row, in which a rule judge finds the known answer."""

    uid: str
    category: str
    messages: tuple[Message, ...]
    row: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        """The prompt as one text, for the judge."""
        return as_text(self.messages)


def load_questions(source: Source, max_questions: int | None, seed: int) -> list[Question]:
    """Returns the first `max_questions` questions of a file or Hub data set (None: all).

    Raises ValueError when there is none, when a row has no prompt, and when two questions have the same uid.
    """
    rows = load_rows(Data(sources=(source,), max_samples=max_questions), seed)
    questions = [to_question(row, source, number) for number, row in enumerate(rows, 1)]
    seen: dict[str, int] = {}
    for number, question in enumerate(questions, 1):
        if question.uid in seen:
            raise ValueError(
                f"{source.path}, row {number}: has the uid {question.uid!r} of row {seen[question.uid]} (without a uid: the same prompt): "
                f"give each question a `uid` of its own"
            )
        seen[question.uid] = number
    return questions


def to_question(row: Mapping[str, Any], source: Source, number: int) -> Question:
    """Converts a row of `load_rows` to a question; a digest of the prompt replaces a missing uid.

    `number` (from 1) is for messages. Raises ValueError when there is no prompt or it is empty.
    """
    where = f"{source.path}, row {number}"
    value = row.get("prompt")
    if value is None and isinstance(row.get("turns"), list):  # v0.1's turns have no role: all are the user's
        value = [{"role": "user", **turn} if isinstance(turn, dict) else turn for turn in row["turns"]]
    if value is None:
        raise ValueError(
            f"{where}: there is no {source.prompt_key!r} (nor `turns`): set prompt_key of the questions to one of {', '.join(row)}"
        )
    messages = tuple(prompt_of(Located(where, {"prompt": value})))
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: the prompt is empty: fill it or drop the row")
    uid = row.get("uid") or row.get("question_id") or digest(list(messages))
    return Question(str(uid), str(row.get("category") or "all"), messages, row)
