"""Keeps the tokens of a conversation as they were sampled, without tokenising them again.

The environment's messages between answers are rendered by the chat template and masked.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Document, Message, Prompt, compact
from rlhf_core.data.pictures.message_parts import (
    MAX_PICTURES,
    named_pictures,
    parts_of,
    sources_in,
    with_sources,
)
from rlhf_core.environments.conversation import Answer, Call
from rlhf_core.environments.trajectories.calls import CallFormat
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer

NO_LIMIT = sys.maxsize


Limit = Literal["turns", "tokens", "time"]


class Full(Exception):
    """Raised when a conversation has no turns or tokens left. `limit`: which of the two has run out."""

    def __init__(self, message: str, limit: Limit):
        super().__init__(message)
        self.limit = limit


class Limits(NamedTuple):
    """Limits on a conversation: answers, tokens of the prompt, tokens after the prompt, and tokens of one
    answer."""

    turns: int
    prompt_tokens: int
    tokens: int
    answer_tokens: int | None


class AnswerPlace(NamedTuple):
    """Locates an answer: its first and last token, whether it is complete, and the number of messages up to
    it."""

    first: int
    last: int
    finished: bool
    messages: int


class Trajectory:
    """Holds the tokens of one conversation. `prompt`: all messages before the first answer, once that answer
    is requested. `messages`: all messages, with only the names of images. `pictures`: the images, with their
    tokens. `whole`: whether a prompt over its limit is an error instead of being truncated; a prompt with
    images is never truncated."""

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        limits: Limits,
        tools: Sequence[dict[str, Any]],
        calls: CallFormat | None,
        whole: bool = False,
    ):
        self.prompt = prompt
        self.messages = list[Message](prompt.messages)
        self._renderer = renderer
        self._limits = limits
        self._tools = tools
        self._calls = calls
        self._whole = whole
        self._tokens = list[int]()
        self._mask = list[bool]()
        self._logprobs = list[float]()
        self._answers = list[AnswerPlace]()
        self._copied = 0  # number of answers shared with another trajectory
        self._cut = False  # whether a limit ended the conversation after the last answer
        self._versions = list[tuple[int, int]]()
        self._called = 0
        self._experts: np.ndarray | None = None
        self.pictures: Pictures = ()

    def ask(self, new: Sequence[Message], left: int = NO_LIMIT) -> tuple[list[int], int]:
        """Adds messages. Returns all tokens and the token limit of the next answer. `left`: the number of
        tokens that the episode may still use. Raises Full, or ValueError for messages that the template
        rejects and for images that cannot be used; in both cases nothing is added. After Full the
        conversation counts as not `finished`, unless another answer follows."""
        new = [_with_sources(message) for message in new]
        if len(self.pictures) + len(sources_in(new)) > MAX_PICTURES:
            raise ValueError(f"an episode may have {MAX_PICTURES} images, and the environment sends more")
        if not self._answers:
            return self._open(new, left)
        if self.turns >= self._limits.turns:
            self.cut()
            raise Full(f"the conversation has its {self._limits.turns} answers (max_turns)", "turns")
        added = self._renderer.follow_document(self.messages, new, self.ended, self._tools)
        used = len(self._tokens) - len(self.prompt.tokens) + len(added)
        room = min(self._room(used), left - len(added))
        if room < 1:
            self.cut()
            raise Full(f"the conversation has its {self._limits.tokens} tokens (generate_max_len)", "tokens")
        self.pictures += moved(added.pictures, len(self._tokens))
        self._tokens += added.tokens
        self._mask += [False] * len(added)
        self._logprobs += [0.0] * len(added)
        self.messages += named_pictures(new)
        return self._tokens, room

    def cut(self) -> None:
        """Records that a limit ended the conversation, so that it counts as not `finished`."""
        self._cut = True

    def _open(self, new: Sequence[Message], left: int) -> tuple[list[int], int]:
        """Renders the prompt and returns the same as `ask`. Raises Full if no tokens are left."""
        prompt = self.prompt
        if new or self._tools or not prompt.tokens:
            known = with_sources(prompt.messages, [picture.source for picture in prompt.pictures])
            messages = [*known, *new]
            document, cut = self._rendered(messages)
            shown = tuple(named_pictures(messages))
            prompt = Prompt(shown, list(document.tokens), prompt.row, cut, document.pictures)
        room = min(self._room(0), left - len(prompt.tokens))
        if room < 1 or (prompt.truncated and (self._whole or prompt.pictures)):
            limit = self._limits.prompt_tokens
            message = f"the messages have more tokens than are left, at most {limit} (prompt_max_len)"
            raise Full(message, "tokens")
        self.prompt = prompt
        self.messages = list(prompt.messages)
        self.pictures = prompt.pictures
        self._tokens = list(prompt.tokens)
        self._mask = [False] * len(self._tokens)
        self._logprobs = [0.0] * len(self._tokens)
        return self._tokens, room

    def _rendered(self, messages: Sequence[Message]) -> tuple[Document, bool]:
        """Returns the prompt, truncated unless `whole` or with images, and whether it was too long."""
        if not self._whole and not sources_in(messages):
            return self._renderer.document_within(messages, self._limits.prompt_tokens, self._tools)
        document = self._renderer.prompt_document(messages, self._tools)
        return document, len(document) > self._limits.prompt_tokens

    def _room(self, used: int) -> int:
        left = self._limits.tokens - used
        return left if self._limits.answer_tokens is None else min(left, self._limits.answer_tokens)

    def take(self, answer: SampledAnswer) -> tuple[Answer, Message]:
        """Adds the model's answer. Returns it in the environment's form and as a message."""
        start = len(self._tokens)
        self._versions += [(start + first, version) for first, version in answer.versions]
        self._tokens += answer.tokens
        self._mask += [True] * len(answer.tokens)
        self._logprobs += list(answer.logprobs) or [0.0] * len(answer.tokens)
        self._experts = answer.experts
        self._cut = False
        text = self._renderer.decoded(answer.tokens, True)
        calls = list[Call]()
        if self._calls:  # a call may start with a special token
            before, calls = self._calls.read(
                self._renderer.decoded(answer.tokens[: len(answer.tokens) - answer.finished], False)
            )
            text = before if calls else text
            calls = [replace(call, id=f"call{self._called + i:05d}"[:9]) for i, call in enumerate(calls)]
            self._called += len(calls)
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
                for c in calls
            ]
        self.messages.append(message)
        place = AnswerPlace(start, len(self._tokens) - 1, answer.finished, len(self.messages))
        self._answers.append(place)
        return Answer(text, answer.finished, calls, start, len(answer.tokens)), message

    def forked(self, answers: int) -> Trajectory:
        """Returns a trajectory that continues after the first `answers` answers of this one. The tokens
        copied from this one are masked, since this one trains on them."""
        end = self._answers[answers - 1].last + 1
        made = Trajectory(self.prompt, self._renderer, self._limits, self._tools, self._calls, self._whole)
        made.messages = self.messages[: self._answers[answers - 1].messages]
        made._tokens = self._tokens[:end]
        made._mask = [False] * end
        made._logprobs = [0.0] * end
        made._answers = self._answers[:answers]
        made._copied = answers
        made._called = self._called
        made.pictures = until(self.pictures, end)
        return made

    def drop_last(self) -> None:
        """Drops the last answer and the messages to which it responds."""
        self._answers.pop()
        self._experts = None
        self.drop_request()

    def drop_request(self) -> None:
        """Drops the messages after the last answer."""
        end = self._answers[-1].last + 1 if self._answers else len(self.prompt.tokens)
        messages = self._answers[-1].messages if self._answers else len(self.prompt.messages)
        del self.messages[messages:], self._tokens[end:], self._mask[end:], self._logprobs[end:]
        self._versions = [(first, version) for first, version in self._versions if first < end]
        self.pictures = until(self.pictures, end)

    @property
    def document(self) -> Document:
        """Returns the whole conversation up to the last answer; before the first answer, the prompt."""
        end = self._answers[-1].last + 1 if self._answers else len(self._tokens)
        if not end:
            return compact(self.prompt.tokens, (), pictures=self.prompt.pictures)
        tokens = array("i", self._tokens[:end])
        mask = array("b", self._mask[:end])
        return Document(tokens, mask, experts=self._experts, pictures=until(self.pictures, end))

    @property
    def logprobs(self) -> np.ndarray:
        """Returns the sampler's log-probs (T,), which are 0 outside the mask."""
        return np.array(
            (self._logprobs or [0.0] * len(self.prompt.tokens))[: len(self.document)], dtype=np.float32
        )

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Returns pairs of a token index and the version of the weights that sampled the tokens from there
        on."""
        return self._versions

    @property
    def turns(self) -> int:
        """Returns the number of answers that this trajectory trains on."""
        return len(self._answers) - self._copied

    @property
    def size(self) -> int:
        """Returns the number of tokens so far, including messages that await an answer."""
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        """Returns False if a limit ended the conversation: a limit on tokens or turns, during the last answer
        or before the environment was done, or a limit on time (see `cut`)."""
        return self.ended and not self._cut

    @property
    def ended(self) -> bool:
        """Returns whether the last answer is complete, even if a limit ended the conversation after it."""
        return not self._answers or self._answers[-1].finished

    @property
    def ends(self) -> list[int]:
        """Returns the index of the last token of each answer that this trajectory trains on."""
        return [place.last for place in self._answers[self._copied :]]


def moved(pictures: Pictures, by: int) -> Pictures:
    """Returns images whose tokens are `by` tokens later."""
    return tuple(picture._replace(start=picture.start + by, stop=picture.stop + by) for picture in pictures)


def until(pictures: Pictures, end: int) -> Pictures:
    """Returns the images among the first `end` tokens."""
    return tuple(picture for picture in pictures if picture.stop <= end)


def _with_sources(message: Message) -> Message:
    """Returns an environment's message with the images that its content names in base64; see
    `sent_content`."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": parts_of(message["content"], "the environment's message", None)}
