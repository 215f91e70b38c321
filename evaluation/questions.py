"""Questions of an evaluation: our rows, Arena-Hard v2.0's {uid, category, prompt} and v0.1's {question_id, category, turns}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import Data, Source
from rlhf_core.data.columns import Located, prompt_of
from rlhf_core.data.documents import Message
from rlhf_core.data.rows import load_rows
from rlhf_core.stage import digest


@dataclass(frozen=True)
class Question:
    """A prompt as chat messages. `row` is the whole row, where a rule finds its known answer."""

    uid: str
    category: str
    messages: tuple[Message, ...]
    row: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        """The prompt as one text: what the judge reads. Several turns are told apart by their role."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


def load_questions(source: Source, max_questions: int | None, seed: int) -> list[Question]:
    """All questions of a file or Hub data set, or the first `max_questions` of them.

    Raises ValueError when there is none, when a row has no prompt, and when two questions share a uid.
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
    """One row of `load_rows` as a question; `number` (from 1) names it in errors. Without a uid it gets a digest of its prompt."""
    where = f"{source.path}, row {number}"
    value = row.get("prompt")
    if value is None and isinstance(row.get("turns"), list):  # v0.1's turns carry no role: each is the user's
        value = [{"role": "user", **turn} if isinstance(turn, dict) else turn for turn in row["turns"]]
    if value is None:
        raise ValueError(
            f"{where}: there is no {source.prompt_key!r} (nor `turns`): set prompt_key of the questions to the prompt's column"
        )
    messages = tuple(prompt_of(Located(where, {"prompt": value})))
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{where}: the prompt is empty: fill it or drop the row")
    uid = row.get("uid") or row.get("question_id") or digest(list(messages))
    return Question(str(uid), str(row.get("category") or "all"), messages, row)
