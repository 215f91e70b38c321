"""Loads the questions of an evaluation from rows in this project's format, in Arena-Hard v2.0's {uid,
category, prompt}, or in v0.1's {question_id, category, turns}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import Data, Evaluation, Regression, Source, VllmJudge
from rlhf_core.data.documents import Message, as_text
from rlhf_core.data.pictures.message_parts import marked_text, sources_in
from rlhf_core.data.pictures.picture_source import PictureFault, PictureSource
from rlhf_core.data.prompt_rows import engine_refusal
from rlhf_core.data.rows.columns import Located, pictured_prompt_of
from rlhf_core.data.rows.mixture import placed_rows
from rlhf_core.data.rows.required_columns import key_to_set
from rlhf_core.system.files import digest


@dataclass(frozen=True)
class Question:
    """Holds a prompt as chat messages; content with images is a list of parts (see `message_parts`). `row` is
    the whole row, including the known answer that a rule judge needs. `where` is the row's file and
    number."""

    uid: str
    category: str
    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    where: str = ""

    @property
    def prompt(self) -> str:
        """Returns the prompt as one string for the judge, with each image replaced by `<image>`."""
        return as_text([{**each, "content": marked_text(each["content"])} for each in self.messages])

    @property
    def pictures(self) -> list[PictureSource]:
        """Returns the images of the prompt, in order."""
        return sources_in(self.messages)

    def known_answer(self, key: str) -> str:
        """Returns the column `key` as a string. Raises ValueError if it is missing, null or blank."""
        value = self.row.get(key)
        if value is not None and str(value).strip():
            return str(value)
        where = self.where or f"question {self.uid}"
        if key in self.row:
            found = "null" if value is None else "empty"
            raise ValueError(
                f"{where}: column {key!r} is {found}, and the rule judge compares answers with it: fill it or"
                " drop the row"
            )
        prompt = self.row.get("prompt", self.row)
        # the row contains the prompt under both of these names
        others = [name for name, other in self.row.items() if other is not prompt]
        raise ValueError(
            f"{where}: there is no column {key!r}, which the rule judge compares answers with; "
            f"{'its other columns are ' + ', '.join(others) if others else 'there is none but the prompt'}: "
            f"set {key_to_set('answer_key', key, others)} in the rule judge, or choose another judge"
        )


def load_questions(source: Source, max_questions: int | None, seed: int) -> list[Question]:
    """Returns the first `max_questions` questions of a file or Hub data set (None: all).

    Raises ValueError if there are no questions, a row has no prompt, an image cannot be read, or two
    questions have the same uid.
    """
    placed = placed_rows(Data(sources=(source,), max_samples=max_questions), seed, None)
    located = [each.located for each in sorted(placed, key=lambda each: each.place)]
    questions = [to_question(each.row, source, number, each.folder) for number, each in enumerate(located, 1)]
    seen: dict[str, int] = {}
    for number, question in enumerate(questions, 1):
        if question.uid in seen:
            raise ValueError(
                f"{source.path}, row {number}: has the uid {question.uid!r} of row {seen[question.uid]}"
                " (without a uid: the same prompt): give each question a `uid` of its own"
            )
        seen[question.uid] = number
    return questions


def cannot_see(config: Evaluation) -> Iterator[str]:
    """Yields a sentence about each part of an evaluation that cannot read images. Call it for questions with
    images."""
    models = {config.baseline, *config.models, *(config.parents or {}).values()}
    if models - config.endpoints.keys() and (refusal := engine_refusal(config.engine)):
        yield f"they have images, which these engines do not read: {refusal}"
    if any(isinstance(judge, VllmJudge) for judge in config.judges):
        yield "they have images, which judges of kind vllm do not read: use rule, reward or openai judges"
    if isinstance(config, Regression):
        yield "they have images, and a suite keeps texts alone: ask them in an evaluation"


def to_question(row: Mapping[str, Any], source: Source, number: int, folder: str | None = None) -> Question:
    """Converts a row of `load_rows` to a question. A digest of the prompt replaces a missing uid.

    `number` (counted from 1) is for error messages. `folder` is the folder of the row's images. Raises
    ValueError if the prompt is missing or empty, or if an image cannot be read.
    """
    where = f"{source.path}, row {number}"
    value = row.get("prompt")
    if value is None and isinstance(row.get("turns"), list):  # v0.1's turns have no role: all are the user's
        value = [{"role": "user", **turn} if isinstance(turn, dict) else turn for turn in row["turns"]]
    if value is None:
        raise ValueError(
            f"{where}: there is no column {source.prompt_key!r}, nor 'turns'; its columns are"
            f" {', '.join(row)}: set {key_to_set('prompt_key', source.prompt_key, row)} in the questions"
        )
    messages = tuple(pictured_prompt_of(Located(where, {**row, "prompt": value}, folder=folder)))
    if not any(marked_text(message["content"]).strip() for message in messages):
        raise ValueError(f"{where}: the prompt is empty: fill it or drop the row")
    identity = _identity(messages, where)
    uid = row.get("uid") or row.get("question_id") or digest(identity)
    return Question(str(uid), str(row.get("category") or "all"), messages, row, where)


def _identity(messages: Sequence[Message], where: str) -> list[Message]:
    """Returns the messages with each image replaced by a digest of its content."""
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [_identified(part, where) for part in message["content"]]}
        for message in messages
    ]


def _identified(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    try:
        return {"type": "image", "digest": part["picture"].content_digest}
    except PictureFault as fault:
        raise ValueError(f"{where}: {fault}") from fault
