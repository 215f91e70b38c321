"""Gives a user's environment a conversation with the model. Runs in an environment process and uses only the
standard library.

An environment is a class with `async def rollout(self, task, model)`. `task` has all columns of a row of the
prompts; `model` is a `Conversation` that starts with the row's prompt. It returns the final reward as a
number, or None if all rewards were given through `model.reward`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlhf_core.data.pictures.environment_content import check_size, sent_content, with_own_images
from rlhf_core.environments.joined_calls import JoinedCalls, Message


class LimitReached(Exception):
    """Raised when the conversation has used up its turns or tokens. A rollout that does not catch this
    exception ends with the rewards given so far."""


@dataclass(frozen=True)
class Call:
    """A tool call in an answer. If its arguments cannot be parsed, `arguments` is empty and `wrong` explains
    why. `id` is the value to send back as `tool_call_id`."""

    name: str
    arguments: dict[str, Any]
    wrong: str = ""
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer from the model. `text`: without tool calls and control tokens. `finished`: False if a token
    limit truncated the answer. `prompt_tokens`, `tokens`: the number of tokens before the answer and in
    it."""

    text: str
    finished: bool
    calls: list[Call] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


class Conversation:
    """A conversation with the model. `messages`: all messages so far. `turns`: the number of answers since
    the prompt. `images`: whether messages may have images.

    `random` is seeded by the run, the iteration and the prompt. All answers to a prompt share the seed,
    because they are compared with each other.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        seed: int,
        ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        images: bool = False,
        folder: str | None = None,
        own: Mapping[str, str] = MappingProxyType({}),
    ):
        """`ask` sends a request: the new messages, the number of their conversation and, if the request
        starts that conversation, its tools or the conversation that it forks; see `CallPlace`. `folder`: the
        folder of image files; None if no images are read. `own`: the files of the row's images, by path; see
        `with_own_images`."""
        self.messages = list(messages)
        self.turns = 0
        self.rewards = list[float]()
        self.answered = list[int]()  # the calls that `rewards` refer to
        self.rewarded = False
        self.random = random.Random(seed)
        self.images = images
        self._folder = folder
        self._ask = ask
        self._lost = False
        # relative paths are those of the environment's folder
        self._own = {path: file for path, file in own.items() if os.path.isabs(path)}
        self._calls = JoinedCalls(images, own)

    async def answer(self, *new: str | Message) -> Answer:
        """Adds messages (a string becomes a user message) and returns the model's answer. The content of a
        message is a text, or a list of texts and images, as in rows of data. Raises LimitReached if no turns
        or tokens are left."""
        if self.turns and not new:
            raise ValueError("model.answer() without a message, after an answer: say something to it")
        added: list[Message] = [
            {"role": "user", "content": message} if isinstance(message, str) else dict(message)
            for message in new
        ]
        for message in added:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
                raise ValueError(
                    "model.answer() takes texts, or messages with a role and a content, which is a text or a"
                    f" list of parts, not {message!r:.80}"
                )
            message["content"] = sent_content(
                with_own_images(message["content"], self._own), self.images, self._folder
            )
        check_size(added)
        if self._lost:
            raise RuntimeError(
                "a wait for an answer was cancelled before, so the conversation cannot go on: end the episode"
            )
        self._lost = True
        reply = await self._ask({"ask": added, "conversation": 0})
        self._lost = False
        answer = self._answer_of(reply)
        self.messages += [*added, reply["message"]]
        return answer

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), most: int | None = None
    ) -> Answer:
        """Returns the model's answer to a complete list of messages in OpenAI's chat completions format.

        `most`: the maximum number of tokens in the answer. A list that starts with an earlier list and its
        answer continues that conversation; any other list starts a new conversation (see `joined_calls`).
        Calls may overlap and may be cancelled. Raises LimitReached, and ValueError for invalid messages.
        """
        place = self._calls.place(messages, list(tools))
        request = {"ask": place.new, "conversation": place.conversation.number, "fork": place.fork}
        try:
            check_size(place.new)
            reply = await self._ask(request | {"tools": list(tools), "most": most})
            answer = self._answer_of(reply)
        except (LimitReached, ValueError):
            self._calls.refused(place)
            raise
        self._calls.answered(place.conversation, reply["message"])
        return answer

    def _answer_of(self, reply: dict[str, Any]) -> Answer:
        if "limit" in reply:
            raise LimitReached(reply["limit"])
        if "wrong" in reply:
            raise ValueError(reply["wrong"])
        self.turns += 1
        self.rewards.append(0.0)
        self.answered.append(reply["call"])
        calls = [Call(**call) for call in reply["calls"]]
        return Answer(reply["text"], reply["finished"], calls, reply["prompt_tokens"], reply["tokens"])

    def reward(self, value: float) -> None:
        """Adds `value` to the reward of the last answer."""
        if not self.turns:
            raise ValueError("model.reward() before the first answer: ask first")
        self.rewards[-1] += float(value)
        self.rewarded = True
