"""Reads messages, answers, labels and rewards from rows. Torch-free.

Every reader raises ValueError with the row's place if a column has the wrong type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_core.config.data import Rows
from rlhf_core.data.documents import Message
from rlhf_core.data.pictures.message_parts import (
    content_text,
    parts_of,
    shown_text,
    sources_in,
    with_pictures,
)

Kind = Rows
Row = dict[str, Any]
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant")}


class Located(NamedTuple):
    """Holds a row with standard column names. `where` is its file and number, for error messages.
    `no_preference` is the reason why the row prefers no answer, or ''. `folder` is the folder of its file, or
    None for a data set without a folder."""

    where: str
    row: Row
    no_preference: str = ""
    folder: str | None = None


class Preference(NamedTuple):
    """Holds a prompt with two answers; an answer that calls tools is a message. `margin` is 0.0 if the data
    has none. `cut` says whether the length limit ended each of (chosen, rejected)."""

    prompt: list[Message]
    chosen: str | Message
    rejected: str | Message
    margin: float
    cut: tuple[bool, bool] = (False, False)


def conversation_of(located: Located) -> list[Message]:
    """Returns the messages of an SFT row. `weight: 0` marks an answer that is not trained on. The content of
    a message with images is a list of parts (see `message_parts`)."""
    return with_pictures(_conversation_of(located), located.row, located.where, located.folder)


def _conversation_of(located: Located) -> list[Message]:
    where = located.where
    row = located.row
    if row.get("messages") is not None:
        if isinstance(row["messages"], str):
            raise ValueError(f"{where}: the messages must be a list of {{role, content}}, found a string")
        return _messages(row["messages"], located, "messages")
    if row.get("prompt") is None and row.get("response") is None:
        raise ValueError(
            f"{where}: there is neither 'messages' nor 'prompt' with 'response': fill them or drop the row"
        )
    return [
        *_prompt_of(located),
        {"role": "assistant", "content": text_of(row.get("response"), where, "response")},
    ]


def prompt_of(located: Located) -> list[Message]:
    """Returns the messages of a prompt; a string becomes one user message. Removes weights, because prompts
    are not trained on. Raises ValueError for a row with images."""
    messages = _prompt_of(located)
    _refuse_pictures(located, messages)
    return messages


def pictured_prompt_of(located: Located) -> list[Message]:
    """Works like `prompt_of`, but for a row that may have images. The content of a message with images is a
    list of parts (see `message_parts`)."""
    return with_pictures(_prompt_of(located), located.row, located.where, located.folder)


def _prompt_of(located: Located) -> list[Message]:
    messages = without_weights(_messages(located.row.get("prompt"), located, "prompt"))
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{located.where}: the prompt ends with an assistant message, so there is nothing to answer"
        )
    return messages


def _refuse_pictures(located: Located, messages: Sequence[Message]) -> None:
    """Raises ValueError if the messages, or the columns of their row, have images."""
    if sources_in(with_pictures(messages, located.row, located.where, located.folder)):
        raise ValueError(
            f"{located.where}: has images, which are read only by sft with messages, or prompt and response,"
            " by reward_model, dpo and kto, and in prompts of ppo, rounds and evaluations: drop the row's"
            " images, or use one of these"
        )


def preference_of(located: Located) -> Preference:
    """Returns the prompt and the two answers of a preference row.

    An answer is a string, a list with one assistant message, or a whole conversation that begins with the
    prompt. Images belong to the prompt, whose content is then a list of parts (see `message_parts`).
    """
    where = located.where
    row = located.row
    answers: list[str | Message] = []
    starts: list[list[Message]] = []
    for column in ("chosen", "rejected"):
        if isinstance(row.get(column), str):
            answers.append(row[column])
            starts.append([])
        else:
            messages = _messages(row.get(column), located, column)
            if messages[-1]["role"] != "assistant":
                raise ValueError(
                    f"{where}: the {column} conversation must end with an assistant message, not"
                    f" {messages[-1]['role']!r}"
                )
            if "weight" in messages[-1]:
                raise ValueError(
                    f"{where}: the {column} answer has weight 0, and a comparison trains on both answers:"
                    " drop the row"
                )
            if not isinstance(messages[-1]["content"], str):
                raise ValueError(
                    f"{where}: the {column} answer has an image, but only text is trained on: drop the row"
                )
            answers.append(messages[-1] if messages[-1].get("tool_calls") else messages[-1]["content"])
            starts.append(without_weights(messages[:-1]))
    if starts[0] and starts[1] and starts[0] != starts[1]:
        raise ValueError(
            f"{where}: chosen and rejected may differ only in their last message, but they differ before it"
        )
    prompt = starts[0] or starts[1]
    if prompt:
        _require_same_prompt(located, prompt)
    else:
        prompt = _prompt_of(located)
    prompt = with_pictures(prompt, row, where, located.folder)
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the prompt ends with an assistant message, so there is nothing to answer")
    cut = row.get("chosen_cut") is True, row.get("rejected_cut") is True
    margin = number_of(0.0 if row.get("margin") in (None, "") else row["margin"], where, "margin")
    return Preference(prompt, answers[0], answers[1], margin, cut)


def text_preference_of(located: Located) -> Preference:
    """Works like `preference_of`, but raises ValueError for a row with images."""
    preference = preference_of(located)
    _refuse_pictures(located, preference.prompt)
    return preference


def _require_same_prompt(located: Located, start: list[Message]) -> None:
    """Raises ValueError if a preference's column `prompt` contradicts the messages before its answers, or has
    different images."""
    given = located.row.get("prompt")
    if not given or not isinstance(given, str | list):
        return
    messages = _messages(given, located, "prompt")
    images = sources_in(messages)  # None means the next image of the row's column
    seen = sources_in(with_pictures(start, located.row, located.where, located.folder))
    last = seen[max(0, len(seen) - len(images)) :]
    same = [one is None or one == other for one, other in zip(images, last, strict=False)]
    if len(same) < len(images) or not all(same):
        raise ValueError(
            f"{located.where}: the prompt has other images than the messages before the answers in chosen and"
            " rejected: put the same there, or drop the column 'prompt'"
        )
    said = " ".join(shown_text(messages[-1]["content"]).split())
    texts = [
        " ".join(shown_text(message["content"]).split()) for message in start if message["role"] != "system"
    ]
    if any(said in text or text in said for text in texts):
        return
    raise ValueError(
        f"{located.where}: the prompt says {said!r:.60}, and the messages before the answers in chosen and"
        f" rejected say {texts[-1]!r:.60}: correct or drop the row, or drop the column 'prompt'"
    )


def answer_of(located: Located) -> tuple[list[Message], str]:
    """Returns the prompt and the response of a row."""
    return prompt_of(located), text_of(located.row.get("response"), located.where, "response")


def reward_of(located: Located) -> float:
    """Returns the reward of a row's response."""
    return number_of(located.row.get("reward"), located.where, "reward")


def labelled_of(located: Located) -> tuple[list[Message], list[tuple[str | Message, bool]]]:
    """Returns a row's prompt and its labelled responses: one response, or both responses of a preference."""
    if "label" not in located.row:
        preference = preference_of(located)
        return preference.prompt, [(preference.chosen, True), (preference.rejected, False)]
    prompt = with_pictures(_prompt_of(located), located.row, located.where, located.folder)
    response = text_of(located.row.get("response"), located.where, "response")
    label = str(located.row["label"]).lower()
    if label not in LABELS:
        raise ValueError(
            f"{located.where}: column 'label' must be true or false (or 1 or 0), found"
            f" {located.row['label']!r}"
        )
    return prompt, [(response, LABELS[label])]


LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
READERS = {
    "sft": conversation_of,
    "preference": preference_of,
    "prompt": pictured_prompt_of,
    "answer": answer_of,
    "labelled": labelled_of,
    "scored": lambda located: (answer_of(located), reward_of(located)),
}


def _messages(value: Any, located: Located, column: str) -> list[Message]:
    where = located.where
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong(value, where, column, "a string or a list of messages")
    messages = []
    for number, message in enumerate(value, start=1):
        place = f"{where}: message {number} of column {column!r}"
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list | tuple):
            content = parts_of(content, place, located.folder)
        if calls:
            content = content or ""
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(content, str | list)
        ):
            raise ValueError(f"{place} must have a role and a content, both strings")
        if message.get("function_call"):
            raise ValueError(f"{place} has a function_call, an old form: write it as tool_calls")
        role = message["role"]
        meant = OTHER_NAMES.get(role.lower(), role.lower())  # templates render any role, even a misspelt one
        if meant != role and meant in USUAL_ROLES:
            raise ValueError(
                f"{where}: message {number} of column {column!r} has the role {role!r}, which is no chat"
                f" role: write {meant}"
            )
        given = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        given |= {"tool_calls": _calls(calls, place, role)} if calls else {}
        given |= _weight(message, place)
        messages.append({"role": role, "content": content, **given})
    return messages


def _weight(message: Message, place: str) -> dict[str, int]:
    """Reads a message's `weight`, as in OpenAI's fine-tuning format. Returns {"weight": 0} for an answer that
    is not trained on, otherwise {}."""
    weight = message.get("weight")
    if weight is None:
        return {}
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{place} has the weight {weight!r:.60}: write 0 (not trained on) or 1 (trained on)")
    if message["role"] != "assistant" and weight == 1:
        raise ValueError(
            f"{place} has weight 1, and only answers of the assistant are trained on: leave its weight out"
        )
    return {"weight": 0} if message["role"] == "assistant" and weight == 0 else {}


def without_weights(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages without `weight`, as templates expect them."""
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _calls(calls: Any, place: str, role: str) -> list[dict[str, Any]]:
    """Reads a message's `tool_calls`. Each call is {"function": {"name", "arguments"}}, as in OpenAI's
    format, or only the inner object."""
    if role != "assistant" or not isinstance(calls, (list, tuple)):
        raise ValueError(f"{place}: tool_calls must be a list, and of an assistant message")
    read = []
    for call in calls:
        inner = call.get("function") or call if isinstance(call, dict) else {}
        arguments = inner.get("arguments", {}) if isinstance(inner, dict) else None
        if isinstance(arguments, str):  # OpenAI's format
            arguments = _json(arguments)
        if (
            not isinstance(inner, dict)
            or not isinstance(inner.get("name"), str)
            or not isinstance(arguments, dict)
        ):
            raise ValueError(
                f"{place}: each of tool_calls must have a function with a name and arguments, an object"
            )
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append({"type": "function", **own, "function": {"name": inner["name"], "arguments": arguments}})
    return read


def written(answer: str | Message) -> str:
    """Returns an answer as readable text, with its tool calls as JSON."""
    if isinstance(answer, str):
        return answer
    calls = [
        json.dumps(call["function"], ensure_ascii=False, default=str) for call in answer.get("tool_calls", ())
    ]
    return "\n".join([content_text(answer["content"]), *calls]).strip()


def tools_of(located: Located) -> list[dict[str, Any]]:
    """Returns the tools in a row's column `tools`: a list of JSON schemas of functions, or such a list as a
    JSON string. Returns an empty list if there is no such column."""
    tools = located.row.get("tools")
    if isinstance(tools, str):
        tools = (_json(tools) or "no JSON") if tools.strip() else []
    if not isinstance(tools, (list, tuple, type(None))) or not all(
        isinstance(tool, dict) for tool in tools or ()
    ):
        raise ValueError(
            f"{located.where}: column 'tools' must be a list of JSON schemas of functions, or JSON of one"
        )
    return list(tools or ())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def text_of(value: Any, where: str, column: str) -> str:
    """Returns a row's value if it is a string. Raises ValueError for any other type."""
    if not isinstance(value, str):
        raise _wrong(value, where, column, "a string")
    return value


def number_of(value: Any, where: str, column: str) -> float:
    """Returns a row's value, a number or numeric text, as a float. Raises ValueError if it is not a finite
    number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{where}: column {column!r} must be a finite number, found {value!r:.60}: correct or drop"
            " the row"
        )
    return number


def _wrong(value: Any, where: str, column: str, needed: str) -> ValueError:
    if value is None:
        return ValueError(f"{where}: column {column!r} is missing or null: fill it or drop the row")
    if isinstance(value, (bool, int, float)):
        return ValueError(
            f"{where}: column {column!r} must be {needed}, found {type(value).__name__}: write it as text"
        )
    found = "an empty list" if value == [] else type(value).__name__
    return ValueError(f"{where}: column {column!r} must be {needed}, found {found}: correct or drop the row")
