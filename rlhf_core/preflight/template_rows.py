"""Renders rows of a data set as its stage will, before any work: one of each shape, since a template refuses shapes, not texts.

A shape is the roles of a row's messages, which of them are empty or call tools, and whether tools are described. Control tokens of the
template that are typed in a text are looked for in all rows that are read (`checked_rows`). Torch-free; Hub data sets are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import Data
from rlhf_core.data.documents import Message
from rlhf_core.data.rows.columns import (
    Kind,
    Located,
    answer_of,
    conversation_of,
    labelled_of,
    preference_of,
    prompt_of,
    tools_of,
    written,
)
from rlhf_core.data.rows.files import is_file
from rlhf_core.data.rows.mixture import checked_rows

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer

MOST_SHAPES = 64


class Rendered(NamedTuple):
    """What the rows of a data set show: why the stage would refuse one, and what is odd in one; "" where nothing is."""

    refused: str = ""
    warned: str = ""


def render_rows(
    renderer: Renderer, data: Data, kind: Kind, limited: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Rendered:
    """Renders a row of each shape within `limited()`. Rows that cannot be read are left to `check_columns`."""
    if not all(is_file(source) for source in data.sources):
        return Rendered()
    shapes = set[Any]()
    warned = ""
    try:
        for located in checked_rows(data, kind):
            messages, answers = _texts(kind, located)
            tools = tools_of(located)
            if not warned:
                warned = _control_token(renderer, located.where, messages, answers)
            shape = (_shape(messages), _shape([answer for answer in answers if not isinstance(answer, str)]), bool(tools))
            if shape in shapes or len(shapes) == MOST_SHAPES:
                continue
            shapes.add(shape)
            refused = _refusal(renderer, kind, messages, answers, tools, limited)
            if refused:
                return Rendered(f"{located.where}: {refused}", warned)
    except ValueError:
        return Rendered("", warned)
    return Rendered("", warned)


def _texts(kind: Kind, located: Located) -> tuple[list[Message], list[str | Message]]:
    """Returns the messages of a row, and the answers to them that are not among these."""
    if kind == "sft":
        return conversation_of(located), []
    if kind == "prompt":
        return prompt_of(located), []
    if kind == "preference":
        preference = preference_of(located)
        return preference.prompt, [preference.chosen, preference.rejected]
    if kind == "labelled":
        prompt, labelled = labelled_of(located)
        return prompt, [answer for answer, _ in labelled]
    prompt, text = answer_of(located)
    return prompt, [text]


def _shape(messages: list[Message]) -> tuple[Any, ...]:
    return tuple((message["role"], bool(message["content"].strip()), tuple(sorted(message))) for message in messages)


def _control_token(renderer: Renderer, where: str, messages: list[Message], answers: list[str | Message]) -> str:
    for text in (*(message["content"] for message in messages), *map(written, answers)):
        found = renderer.control_tokens.search(text)
        if found is not None:
            return (
                f"{where}: the text {found[0]!r} is a control token of the model; it is read as plain text, so remove it if it marks a turn"
            )
    return ""


def _refusal(
    renderer: Renderer,
    kind: Kind,
    messages: list[Message],
    answers: list[str | Message],
    tools: list[dict[str, Any]],
    limited: Callable[[], AbstractContextManager[object]],
) -> str:
    try:
        with limited():
            if kind == "sft":
                renderer.conversation(messages, tools)
                return ""
            renderer.prompt(messages, tools)
            for answer in answers:
                renderer.response_tokens(messages, answer, tools)
    except ValueError as error:
        return str(error)
    return ""
