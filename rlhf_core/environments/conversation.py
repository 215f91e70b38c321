"""Gives a user's environment one conversation with the model. Runs in an environment process. Standard
library only.

An environment is a class with `async def rollout(self, task, model)`: `task` has all columns of a row of the
prompts, `model` is a `Conversation` that begins with the row's prompt. It returns the final reward as a
number, or None if `model.reward` gave all rewards.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


class LimitReached(Exception):
    """Reports that the conversation has used up its turns or tokens. A rollout that does not catch it ends
    with the rewards so far."""


@dataclass(frozen=True)
class Call:
    """Describes a tool call in an answer. If its arguments cannot be parsed, `arguments` is empty and `wrong`
    has the reason. `id` is for `tool_call_id`."""

    name: str
    arguments: dict[str, Any]
    wrong: str = ""
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """Holds an answer of the model. `text`: without calls and control tokens. `finished`: False if a token
    limit cut it."""

    text: str
    finished: bool
    calls: list[Call] = field(default_factory=list)


class Conversation:
    """Represents a conversation with the model. `messages`: all messages so far. `turns`: the number of
    answers since the prompt.

    `random` is seeded from the run, the iteration and the prompt. It is the same for all answers to one
    prompt, since these are compared.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        seed: int,
        ask: Callable[[list[Message]], Awaitable[dict[str, Any]]],
    ):
        self.messages = list(messages)
        self.turns = 0
        self.rewards = list[float]()
        self.rewarded = False
        self.random = random.Random(seed)
        self._ask = ask
        self._lost = False

    async def answer(self, *new: str | Message) -> Answer:
        """Adds messages (a string is a user message) and returns the model's answer. Raises LimitReached."""
        if self.turns and not new:
            raise ValueError("model.answer() without a message, after an answer: say something to it")
        added = [
            {"role": "user", "content": message} if isinstance(message, str) else dict(message)
            for message in new
        ]
        for message in added:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValueError(
                    "model.answer() takes texts, or messages with a role and a content that are texts, not"
                    f" {message!r:.80}"
                )
            # replaces lone surrogates
            message["content"] = message["content"].encode(errors="replace").decode()
        if self._lost:
            raise RuntimeError(
                "a wait for an answer was cancelled before, so the conversation cannot go on: end the episode"
            )
        self._lost = True
        reply = await self._ask(added)
        self._lost = False
        if "limit" in reply:
            raise LimitReached(reply["limit"])
        self.messages += [*added, reply["message"]]
        self.turns += 1
        self.rewards.append(0.0)
        return Answer(reply["text"], reply["finished"], [Call(**call) for call in reply["calls"]])

    def reward(self, value: float) -> None:
        """Adds to the reward of the last answer."""
        if not self.turns:
            raise ValueError("model.reward() before the first answer: ask first")
        self.rewards[-1] += float(value)
        self.rewarded = True
