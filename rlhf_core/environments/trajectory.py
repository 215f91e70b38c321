"""Keeps the tokens of a conversation as they were sampled, without tokenising them again.

The environment's messages between the answers are rendered by the chat template and masked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Document, Message, Prompt, compact
from rlhf_core.environments.calls import CallFormat
from rlhf_core.environments.conversation import Answer, Call
from rlhf_core.rollout.engine_contract import SampledAnswer


class Full(Exception):
    """Reports that a conversation has no turns or tokens left."""


class Limits(NamedTuple):
    """Limits a conversation: answers, tokens of the prompt, tokens after it, tokens of one answer."""

    turns: int
    prompt_tokens: int
    tokens: int
    answer_tokens: int | None


class Trajectory:
    """Holds the tokens of one conversation. `prompt`: all messages before the first answer, once that is
    requested."""

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        limits: Limits,
        tools: Sequence[dict[str, Any]],
        calls: CallFormat | None,
    ):
        self.prompt = prompt
        self.messages = list[Message](prompt.messages)
        self._renderer = renderer
        self._limits = limits
        self._tools = tools
        self._calls = calls
        self._tokens = list[int]()
        self._mask = list[bool]()
        self._logprobs = list[float]()
        self._ends = list[int]()  # index of the last token of each answer
        self._finished = True  # the last answer is complete
        self._cut = False  # a limit ended the conversation after the last answer
        self._versions = list[tuple[int, int]]()
        self._called = 0
        self._experts: np.ndarray | None = None

    def ask(self, new: Sequence[Message]) -> tuple[list[int], int]:
        """Adds messages. Returns all tokens, and how many the next answer may have. Raises Full, or
        ValueError for messages that the template rejects; adds nothing then. After Full the conversation is
        not `finished`, unless another answer follows."""
        if not self._ends:
            self._open(new)
            return self._tokens, self._room(0)
        if len(self._ends) >= self._limits.turns:
            self.cut()
            raise Full(f"the conversation has its {self._limits.turns} answers (max_turns)")
        added = self._renderer.follow(self.messages, new, self._finished, self._tools)
        room = self._room(len(self._tokens) - len(self.prompt.tokens) + len(added))
        if room < 1:
            self.cut()
            raise Full(f"the conversation has its {self._limits.tokens} tokens (generate_max_len)")
        self._tokens += added
        self._mask += [False] * len(added)
        self._logprobs += [0.0] * len(added)
        self.messages += new
        return self._tokens, room

    def cut(self) -> None:
        """Records that a limit ended the conversation, which is then not `finished`."""
        self._cut = True

    def _open(self, new: Sequence[Message]) -> None:
        if new or self._tools:
            self.messages += new
            tokens, cut = self._renderer.prompt_within(self.messages, self._limits.prompt_tokens, self._tools)
            self.prompt = Prompt(tuple(self.messages), tokens, self.prompt.row, cut)
        self._tokens = list(self.prompt.tokens)
        self._mask, self._logprobs = [False] * len(self._tokens), [0.0] * len(self._tokens)

    def _room(self, used: int) -> int:
        left = self._limits.tokens - used
        return left if self._limits.answer_tokens is None else min(left, self._limits.answer_tokens)

    def take(self, answer: SampledAnswer) -> tuple[Answer, Message]:
        """Adds the model's answer. Returns it in the environment's form and as a message."""
        self._versions += [(len(self._tokens) + first, version) for first, version in answer.versions]
        self._tokens += answer.tokens
        self._mask += [True] * len(answer.tokens)
        self._logprobs += list(answer.logprobs) or [0.0] * len(answer.tokens)
        self._ends.append(len(self._tokens) - 1)
        self._finished = answer.finished
        self._experts = answer.experts
        self._cut = False
        text = self._renderer.decoded(answer.tokens, True)
        calls = list[Call]()
        if self._calls:  # special tokens may begin a call
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
        return Answer(text, answer.finished, calls), message

    @property
    def document(self) -> Document:
        """Returns the whole conversation up to the last answer; before the first answer, the prompt."""
        end = self._ends[-1] + 1 if self._ends else len(self._tokens)
        if not end:
            return compact(self.prompt.tokens, ())
        return Document(array("i", self._tokens[:end]), array("b", self._mask[:end]), experts=self._experts)

    @property
    def logprobs(self) -> np.ndarray:
        """Returns the sampler's log-probs (T,), 0 off the mask."""
        return np.array(
            (self._logprobs or [0.0] * len(self.prompt.tokens))[: len(self.document)], dtype=np.float32
        )

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Returns pairs (first token, version of the weights that sampled from there on)."""
        return self._versions

    @property
    def turns(self) -> int:
        """Returns the number of answers."""
        return len(self._ends)

    @property
    def finished(self) -> bool:
        """Returns False if a limit ended the conversation: on tokens or turns, within the last answer or
        before the environment was done, or on time (`cut`)."""
        return self._finished and not self._cut

    @property
    def ended(self) -> bool:
        """Returns whether the last answer is complete, even if the conversation was cut after it."""
        return self._finished

    def early(self, rewards: Sequence[float]) -> np.ndarray | None:
        """Returns the rewards (T,) of all answers but the last, each at its answer's last token; None if they
        are all 0."""
        if not any(rewards[:-1]):
            return None
        placed = np.zeros(len(self.document), np.float32)
        for end, reward in zip(self._ends[:-1], rewards[:-1], strict=True):
            placed[end] = reward
        return placed
