"""Renders rows of a data set as its stage will, before any stage starts. Renders the first rows, to count how
many fit into the token limit. Of the later rows, renders one of each shape, because templates reject rows by
their shape, not by their text.

The shape of a row is the roles of its messages, which messages are empty or call tools, and whether tools are
described. All rows that are read (see `checked_rows`) are searched for the template's control tokens typed as
text. Skips Hub data sets. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import Data
from rlhf_core.data.documents import SUFFIX, Message
from rlhf_core.data.pictures.message_parts import content_text, sources_in
from rlhf_core.data.rows.columns import (
    Kind,
    Located,
    answer_of,
    conversation_of,
    labelled_of,
    pictured_prompt_of,
    preference_of,
    tools_of,
    written,
)
from rlhf_core.data.rows.mixture import CHECKED_ROWS, checked_rows, names, unusable
from rlhf_core.data.rows.row_files import is_file
from rlhf_core.data.sources import maker_of
from rlhf_core.data.survey import BuiltItems
from rlhf_core.preflight.rows.sample import RowSample, noun_of

if TYPE_CHECKING:  # chat imports transformers
    from rlhf_core.data.chat import Renderer

MOST_SHAPES = 64
NO_LIMIT = 1 << 40  # tokens


class Rendered(NamedTuple):
    """Holds the findings from the rows of a data set: the reason why the stage would reject some or all of
    them ("" if it would not), and oddities.

    `items` is the largest number of items that the stage would train on or sample from, or None if some rows
    were not read. `images` says whether any row has images.
    """

    refused: str = ""
    warned: tuple[str, ...] = ()
    items: int | None = None
    images: bool = False


def render_rows(
    renderer: Renderer,
    data: Data,
    kind: Kind,
    limit_field: str = "",
    limit: int = 0,
    limited: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Rendered:
    """Renders the first rows, and one row of each new shape among the later rows, within `limited()`. Applies
    the stage's `limit` in tokens (0: no limit).

    Rows that cannot be read are reported by `check_columns`; a limit below the template's own length is
    reported by `check_limit`.
    """
    if not all(is_file(source) for source in data.sources):
        return Rendered()
    is_limited = limit > renderer.frame_len
    make = maker_of(kind, renderer, limit if is_limited else NO_LIMIT, lambda reward: SUFFIX.format(reward))
    sample = RowSample(limit_field, limit, noun_of(kind))
    shapes = set[Any]()
    control_token = ""
    images = False
    read = later = 0  # number of rows read, and of items in rows after the sample
    try:
        for located in checked_rows(data, kind):
            read += 1
            lacks = unusable(located, kind)
            if lacks:
                if not sample.is_full:
                    sample.see(located.where, BuiltItems((), 0, 1, lacks))
                continue
            messages, answers = _texts(kind, located)
            images = images or bool(sources_in(messages))
            control_token = control_token or _control_token(renderer, located.where, messages, answers)
            shape = (
                _shape(messages),
                _shape([answer for answer in answers if not isinstance(answer, str)]),
                bool(tools_of(located)),
            )
            is_sampled = not sample.is_full
            if not is_sampled:
                later += len(answers) if kind == "labelled" else 1
                if shape in shapes or len(shapes) >= MOST_SHAPES:
                    continue
            try:
                with limited():
                    made = make(located)
            except ValueError as error:
                return Rendered(str(error), _told(control_token), images=images)
            if made.prompt_tokens is not None:
                shapes.add(shape)
            if is_sampled:
                sample.see(located.where, made)
    except ValueError:
        return Rendered("", _told(control_token), images=images)
    are_all = len(data.sources) == 1 and (read < CHECKED_ROWS or read == data.max_samples)
    warned = [control_token]
    if is_limited:
        in_sample = are_all and sample.rows == read
        refusal = sample.refusal(in_sample)
        if refusal:
            return Rendered(f"{names(data)}: {refusal}", _told(control_token), images=images)
        warned += sample.warnings(in_sample)
    return Rendered("", _told(*warned), sample.kept + later if are_all else None, images)


def _told(*sentences: str) -> tuple[str, ...]:
    return tuple(sentence for sentence in sentences if sentence)


def _texts(kind: Kind, located: Located) -> tuple[list[Message], list[str | Message]]:
    """Returns the messages of a row, and the answers that are not part of the messages."""
    if kind == "sft":
        return conversation_of(located), []
    if kind == "prompt":
        return pictured_prompt_of(located), []
    if kind == "preference":
        preference = preference_of(located)
        return preference.prompt, [preference.chosen, preference.rejected]
    if kind == "labelled":
        prompt, labelled = labelled_of(located)
        return prompt, [answer for answer, _ in labelled]
    prompt, text = answer_of(located)
    return prompt, [text]


def _shape(messages: list[Message]) -> tuple[Any, ...]:
    return tuple(
        (message["role"], bool(content_text(message["content"]).strip()), tuple(sorted(message)))
        for message in messages
    )


def _control_token(
    renderer: Renderer, where: str, messages: list[Message], answers: list[str | Message]
) -> str:
    for text in (*(content_text(message["content"]) for message in messages), *map(written, answers)):
        found = renderer.control_tokens.search(text)
        if found is not None:
            return (
                f"{where}: the text {found[0]!r} is a control token of the model; it is read as plain text,"
                " so remove it if it marks a turn"
            )
    return ""
