"""Finds the conversation that a call with a complete list of messages continues. Runs in an environment
process and uses only the standard library.

Clients of OpenAI's protocols send the complete list every time. A call continues a conversation if its
messages start with the messages of an earlier call and the answer to that call, and if it has the same tools.
The conversation's tokens then stay as they were sampled. If the conversation has meanwhile continued, or one
of its answers has not arrived yet, the call forks it. Any other call starts a conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from rlhf_core.data.pictures.environment_content import (
    NO_IMAGES,
    compared_content,
    has_images,
    sent_content,
    with_own_images,
)

Message = dict[str, Any]
DEEPEST = 64  # nesting levels of the JSON in tools and call arguments
ROLES = {"developer": "system", "function": "tool"}  # older or newer names


@dataclass
class KnownConversation:
    """A conversation: its messages so far, in normalised form for comparison, and the number of messages up
    to each answer. `open`: False while a call waits for the next answer, and after an answer was given up."""

    number: int
    tools: Sequence[Any]
    compared: list[Any] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    open: bool = True


class CallPlace(NamedTuple):
    """The place of a call: its conversation, the messages to add and, for a fork, the forked conversation and
    its number of answers before the fork."""

    conversation: KnownConversation
    new: list[Message]
    fork: tuple[int, int] | None


class JoinedCalls:
    """Keeps track of the conversations of one episode. Number 0 is the conversation of `model.answer`.
    `images`: whether messages may have images. `own`: the files of the row's images, by path
    (`with_own_images`)."""

    def __init__(self, images: bool = False, own: Mapping[str, str] = MappingProxyType({})) -> None:
        self._images = images
        self._own = own
        self._known = list[KnownConversation]()
        self._numbers = itertools.count(1)

    def place(self, messages: Sequence[Message], tools: Sequence[Any]) -> CallPlace:
        """Returns the place of a call, and closes its conversation until `answered` or `refused` is called.
        Raises ValueError if the messages are not a conversation waiting for an answer."""
        asked = [plain_message(message, self._images, self._own) for message in messages]
        if not asked or asked[-1]["role"] == "assistant":
            raise ValueError("the messages need a last one that is not the assistant's")
        check_depth([tools, [message.get("tool_calls") for message in asked]])
        compared = [_compared(message) for message in asked]
        found = self._longest(asked, compared, tools)
        if found is None:
            return CallPlace(self._begun(tools, compared), asked, None)
        known, answers = found
        new = asked[known.ends[answers - 1] :]
        if known.open and answers == len(known.ends):
            known.open = False
            known.compared = compared
            return CallPlace(known, new, None)
        conversation = self._begun(tools, compared, known.ends[:answers])
        return CallPlace(conversation, new, (known.number, answers))

    def answered(self, conversation: KnownConversation, message: Message) -> None:
        """Adds an answer that the client has received to its conversation."""
        conversation.compared.append(_compared(plain_message(message)))
        conversation.ends.append(len(conversation.compared))
        conversation.open = True

    def refused(self, place: CallPlace) -> None:
        """Withdraws a call that was not answered, so that another call may continue its conversation."""
        conversation = place.conversation
        if place.fork or not conversation.ends:
            self._known.remove(conversation)
        else:
            del conversation.compared[conversation.ends[-1] :]
            conversation.open = True

    def _begun(
        self, tools: Sequence[Any], compared: list[Any], ends: Sequence[int] = ()
    ) -> KnownConversation:
        made = KnownConversation(next(self._numbers), tools, compared, list(ends), open=False)
        self._known.append(made)
        return made

    def _longest(
        self, asked: list[Message], compared: list[Any], tools: Sequence[Any]
    ) -> tuple[KnownConversation, int] | None:
        """Returns the conversation that has the most messages in common with the request, and how many of its
        answers the request contains; None if there is no such conversation. Among conversations with equally
        many, prefers one that can be continued without a fork."""
        best: tuple[KnownConversation, int] | None = None
        longest = (0, False)
        for known in self._known:
            for answers in range(len(known.ends), 0, -1):
                end = known.ends[answers - 1]
                how_far = (end, known.open and answers == len(known.ends))
                if how_far <= longest:
                    break
                follows = end < len(asked) and asked[end]["role"] != "assistant"
                if follows and known.tools == tools and known.compared[:end] == compared[:end]:
                    best = known, answers
                    longest = how_far
                    break
        return best


def _compared(message: Message) -> list[Any]:
    """Returns the parts of a message by which messages are compared. Clients may strip whitespace from an
    answer's text, or omit a call's ID."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    ]
    return [message["role"], compared_content(message["content"]), calls]


def plain_message(
    message: Message, images: bool = False, own: Mapping[str, str] = MappingProxyType({})
) -> Message:
    """Converts an OpenAI chat completions message to the form that chat templates read: role, content as one
    string or as texts and images (see `sent_content`), and tool calls with their arguments as an object. If
    `images` is set, images are read from base64 URLs and from the row's `own` files, except in answers.
    Raises ValueError if the input is not such a message, or has other parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is an object with a role and a content, not {message!r:.80}")
    role = ROLES.get(message["role"], message["role"])
    reads = images and role != "assistant" and has_images(message.get("content"))
    content = sent_content(with_own_images(message["content"], own), True, None) if reads else _text(message)
    plain: Message = {"role": role, "content": content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    return plain


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = list[str]()
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if has_images([part]) and message["role"] != "assistant":
                raise ValueError(NO_IMAGES)
            raise ValueError(f"the policy reads text alone, and a message has a part of type {kind!r}")
        texts.append(text)
    return "".join(texts).encode(errors="replace").decode()  # replaces lone surrogates


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call has a function with a name, not {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"": arguments}
    plain = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "id": str(call.get("id", "")), "function": plain}


def check_depth(value: Any) -> None:
    """Raises ValueError for lists and objects nested more than `DEEPEST` levels deep."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [part for part in level if isinstance(part, dict | list | tuple)]
        if not inner:
            return
        level = [item for part in inner for item in (part.values() if isinstance(part, dict) else part)]
    raise ValueError(f"tools and calls may have {DEEPEST} levels of lists and objects")
