"""Parses one JSON object as feedback: a row in this project's format, a preference row, a label from the
labelling page, or an OpenAI log. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rlhf_core.feedback.feedback_records import Feedback, Kind

UP = {
    "up": 1,
    "down": 0,
    "true": 1,
    "false": 0,
    "1": 1,
    "0": 0,
    "-1": 0,
    "good": 1,
    "bad": 0,
    "like": 1,
    "dislike": 0,
}
ROLES = ("system", "developer", "user", "assistant", "tool")
VERDICTS = {"A>>B": (0, 1), "A>B": (0, 1), "B>A": (1, 0), "B>>A": (1, 0)}
LARGEST = 1_000_000  # maximum characters in an answer, and in all messages of a prompt
MOST_RANKED = 16  # ranked answers, which give up to 120 pairs
NAME_LENGTH = 200
TIMES = ("at", "created")
THUMBS = ("thumb", "label", "rating")


class Unusable(ValueError):
    """Raised, with the reason, when a row holds no feedback. Such rows are counted and left out."""


def feedback_of(row: Any, source: str = "", annotator: str | None = None) -> Feedback:
    """Returns the feedback in a row. `source`, `annotator`: defaults for rows that do not name one.

    Raises Unusable for a row without a judgement (a tie, a skipped label), and ValueError for a malformed
    row.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a JSON object, found {type(row).__name__}")
    row = (
        _from_log(row)
        if "choices" in row or ("response" in row and isinstance(row["response"], Mapping))
        else row
    )
    if row.get("undone"):
        raise Unusable("a label that was taken back")
    kind, answers, ranks = _judged(row)
    return Feedback(
        kind=kind,
        prompt=_messages(row.get("prompt") if row.get("prompt") is not None else row.get("messages")),
        answers=answers,
        ranks=ranks,
        model=_text(row, "model", None),
        at=_time(_first(row, TIMES)),
        source=_text(row, "source", source) or "",
        annotator=_annotator(row, annotator),
    )


def _judged(row: Mapping[str, Any]) -> tuple[Kind, tuple[str, ...], tuple[int, ...]]:
    """Returns the kind, answers and ranks of a row, depending on its columns."""
    if "verdict" in row:
        if row["verdict"] in (None, "A=B"):
            raise Unusable("a tie or a skipped label")
        if not isinstance(row["verdict"], str) or row["verdict"] not in VERDICTS:
            raise ValueError(
                f"verdict must be one of {', '.join(VERDICTS)}, A=B or null, found {row['verdict']!r:.40}"
            )
        return "ranking", (_answer(row, "answer_a"), _answer(row, "answer_b")), VERDICTS[row["verdict"]]
    if row.get("ranking") is not None:
        return _ranking(row)
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return "ranking", _different(_answer(row, "chosen"), _answer(row, "rejected")), (0, 1)
    answer = _answer(row, "response")
    if row.get("edited") is not None:
        return "edit", _different(answer, _answer(row, "edited")), (1, 0)
    given = _first(row, THUMBS)
    if given is None:
        raise Unusable("no feedback (thumb, label, edited, ranking, or chosen and rejected)")
    thumb = UP.get(str(int(given) if isinstance(given, float) and given.is_integer() else given).lower())
    if thumb is None:
        raise ValueError(f"thumb must be up or down (label: true or false), found {given!r:.40}")
    return "thumb", (answer,), (thumb,)


def _ranking(row: Mapping[str, Any]) -> tuple[Kind, tuple[str, ...], tuple[int, ...]]:
    """Reads `ranking`, a list of answers, best first, in which nested lists hold ties."""
    given = row["ranking"] if isinstance(row["ranking"], list) else []
    groups = [group if isinstance(group, list) else [group] for group in given if group != []]
    answers = tuple(answer for group in groups for answer in group)
    if len(answers) > MOST_RANKED:
        raise ValueError(f"ranking has {len(answers):,} answers: give at most {MOST_RANKED}")
    if (
        len(answers) < 2
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
        or len(set(answers)) < len(answers)
    ):
        raise ValueError(
            "ranking must be a list of two or more different answers, best first; a list in it holds ties"
        )
    if any(len(answer) > LARGEST for answer in answers):
        raise ValueError(f"each answer of ranking must have at most {LARGEST:,} characters")
    if len(groups) < 2:
        raise Unusable("a ranking that prefers no answer")
    return "ranking", answers, tuple(rank for rank, group in enumerate(groups) for _ in group)


def _from_log(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a logged chat completion: {request: {messages, model}, response: {choices, model, created},
    feedback: {...}}, or one object with the response and the messages of its request. The feedback may also
    be at the top level."""
    request = row.get("request") or row.get("body") or row
    response = row.get("response") or row
    response = response.get("body") or response if isinstance(response, Mapping) else {}
    given = row.get("feedback") or row.get("metadata") or {}
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if (
        not isinstance(request, Mapping)
        or not isinstance(choices, list)
        or not choices
        or not isinstance(given, Mapping)
    ):
        raise ValueError("a log needs request.messages, response.choices and feedback")
    message = choices[0].get("message") if isinstance(choices[0], Mapping) else None
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str):
        raise Unusable("an answer without text (a call of a tool, a refusal)")
    own = {
        name: row[name]
        for name in ("at", "source", "annotator", "user", "thumb", "label", "rating", "edited")
        if row.get(name) is not None
    }
    about = {"model": response.get("model") or request.get("model"), "created": response.get("created")}
    if request.get("user") is not None:
        about["user"] = request["user"]
    return {**about, **own, **given, "messages": request.get("messages"), "response": content}


def _messages(prompt: Any) -> tuple[dict[str, Any], ...]:
    read = _read_messages(prompt)
    if sum(len(message["content"]) for message in read) > LARGEST:
        raise ValueError(f"the prompt must have at most {LARGEST:,} characters in all its messages")
    return read


def _read_messages(prompt: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be a text or a list of messages, and not be empty")
    read = []
    for message in prompt:
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        )
        if isinstance(content, list):  # content in parts, of which only text parts are accepted
            parts = [
                part.get("text")
                for part in content
                if isinstance(part, Mapping) and part.get("type") == "text"
            ]
            if len(parts) < len(content):
                raise Unusable("a prompt with images or other parts that are no text")
            content = "".join(map(str, parts))
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(
                f"each message of the prompt needs a role ({', '.join(ROLES)}) and a content, a text"
            )
        read.append({"role": role, "content": content})
    if read[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant message, so there is nothing to answer")
    return tuple(read)


def _answer(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and value
        and isinstance(value[-1], Mapping)
    ):
        value = value[-1].get("content")  # the last message of a conversation
    if not isinstance(value, str) or not value.strip() or len(value) > LARGEST:
        raise ValueError(f"{column} must be a text of 1 to {LARGEST:,} characters")
    return value


def _different(first: str, second: str) -> tuple[str, str]:
    if first == second:
        raise Unusable("two equal answers")
    return first, second


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Returns the first value that is not null; None if all values are null."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


def _annotator(row: Mapping[str, Any], otherwise: str | None) -> str | None:
    """Returns the annotator's full name, or None if it is not known. The name is not shortened, because the
    person's rows could then not be found for deletion. Raises ValueError if it is too long or not a text."""
    column = "annotator" if row.get("annotator") not in (None, "") else "user"
    value = row.get(column)
    name = otherwise if value in (None, "") else value
    if name is not None and (not isinstance(name, str | int) or len(str(name)) > NAME_LENGTH):
        raise ValueError(f"{column} must be a text of at most {NAME_LENGTH} characters")
    return None if name is None else str(name)


def _text(row: Mapping[str, Any], column: str, otherwise: str | None) -> str | None:
    value = row.get(column)
    if value is None or value == "":
        return otherwise
    if not isinstance(value, str | int):
        raise ValueError(f"{column} must be a text, found {type(value).__name__}")
    return str(value)[:NAME_LENGTH]


def _time(value: Any) -> datetime | None:
    """Parses a time in ISO 8601 or in seconds since 1970; returns None for a missing value. A time without a
    zone is taken as UTC. Raises ValueError for any other value."""
    if value is None or value == "":
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return datetime.fromtimestamp(value, UTC)
        read = datetime.fromisoformat(value)
        return read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise ValueError(
            f"at must be a time such as 2026-01-31T12:00:00Z or seconds since 1970, found {value!r:.40}"
        ) from None
