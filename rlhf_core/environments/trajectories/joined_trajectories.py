"""Joins the conversations of one episode.

An environment that uses `model.answer` has one conversation. An agent that sends complete lists of messages
(see `joined_calls`) may have several: sub-agents, a summary that replaces the history, or several attempts
from the same point. All of them are trained with the episode's reward, as one document of several sequences
(see `Document.starts`), in the order of their last answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Document, Message, Prompt
from rlhf_core.environments.conversation import Answer
from rlhf_core.environments.trajectories.calls import CallFormat
from rlhf_core.environments.trajectories.trajectory import Full, Limit, Limits, Trajectory, moved
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer


class TakenAnswer(NamedTuple):
    """An answer of an episode: the call that it answers, its conversation, and its index there."""

    call: int
    conversation: int
    place: int


class JoinedTrajectories:
    """Holds the trajectories of an episode, keyed by conversation number; number 0 starts with the row's
    prompt. `tools`: the tools of the environment and of the row, for trajectory 0.

    All conversations together may have at most `limits.turns` answers, and no more tokens than a single
    conversation could have. `format_of_calls` returns the template's tool call format, and raises ValueError
    for a template without one.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        limits: Limits,
        tools: Sequence[dict[str, Any]],
        format_of_calls: Callable[[], CallFormat],
    ):
        self._renderer = renderer
        self._limits = limits
        self._format_of_calls = format_of_calls
        self._row = prompt.row
        first = Trajectory(prompt, renderer, limits, tools, format_of_calls() if tools else None)
        self._paths = {0: first}
        self._cut_at: int | None = None  # number of answers when a limit refused a request
        self._refused_by: Limit = "tokens"  # which limit that was
        self._waiting = dict[int, tuple[int, int]]()  # by call: its conversation and room in tokens
        self._answers = list[TakenAnswer]()

    def ask(self, call: int, asked: Mapping[str, Any]) -> tuple[list[int], int]:
        """Adds the messages of a request from a `Conversation`. Returns all tokens of its conversation and
        the token limit of the answer. Raises Full if a limit is reached, and ValueError for the same reasons
        as `Trajectory.ask`."""
        path, tokens, room = self._ask(asked)
        room = min(room, asked.get("most") or room)
        self._paths[asked["conversation"]] = path
        self._waiting[call] = (asked["conversation"], room)
        return tokens, room

    def _ask(self, asked: Mapping[str, Any]) -> tuple[Trajectory, list[int], int]:
        if len(self._answers) + len(self._waiting) >= self._limits.turns:
            raise Full(f"the conversation has its {self._limits.turns} answers (max_turns)", "turns")
        path = self._path(asked)
        used = sum(known.size for known in {*self._paths.values(), path})
        reserved = sum(room for _, room in self._waiting.values())
        left = self._limits.prompt_tokens + self._limits.tokens - used - reserved
        if left < 1:
            raise Full(
                "the conversations of this episode have their tokens (prompt_max_len, generate_max_len)",
                "tokens",
            )
        tokens, room = path.ask(asked["ask"], left)
        return path, tokens, room

    def _path(self, asked: Mapping[str, Any]) -> Trajectory:
        """Returns the trajectory for a request: an existing one, a fork of one, or a new one."""
        known = self._paths.get(asked["conversation"])
        if known is not None:
            return known
        if asked.get("fork"):
            number, answers = asked["fork"]
            return self._paths[number].forked(answers)
        tools = asked["tools"]
        calls = self._format_of_calls() if tools else None
        prompt = Prompt((), [], self._row, False)
        return Trajectory(prompt, self._renderer, self._limits, tools, calls, whole=True)

    def pictures_of(self, call: int) -> Pictures:
        """Returns the images of the conversation of a waiting request."""
        return self._paths[self._waiting[call][0]].pictures

    def take(self, call: int, answer: SampledAnswer) -> tuple[Answer, Message]:
        """Adds the model's answer to a request. Returns the same as `Trajectory.take`."""
        number, _ = self._waiting.pop(call)
        path = self._paths[number]
        taken = path.take(answer)
        self._answers.append(TakenAnswer(call, number, path.turns - 1))
        return taken

    def give_up(self, call: int) -> None:
        """Records that the answer to a request is no longer needed."""
        number, _ = self._waiting.pop(call)
        if number and not self._paths[number].turns:
            del self._paths[number]
        else:
            self._paths[number].drop_request()

    def of_row(self, call: int) -> bool:
        """Returns whether a waiting request belongs to the row's conversation."""
        return self._waiting[call][0] == 0

    def rewarded(self, rewards: Mapping[int, float]) -> list[float]:
        """Returns the reward of each answer, in order of arrival. Answers whose call has no reward never
        reached the environment and are dropped. Raises LookupError if one of them belongs to conversation
        0."""
        received = [taken for taken in self._answers if taken.call in rewards]
        if self._cut_at is not None:
            self._cut_at = sum(taken.call in rewards for taken in self._answers[: self._cut_at])
        for taken in self._answers:
            if taken.call in rewards:
                continue
            if taken.conversation == 0:
                raise LookupError("an answer of the row's conversation has no reward")
            # always its last answer: without it, the environment could not have continued the conversation
            self._paths[taken.conversation].drop_last()
        self._answers = received
        return [rewards[taken.call] for taken in received]

    def cut(self, limit: Limit) -> None:
        """Records that a request got no answer because of a limit. The episode then counts as not `finished`,
        unless another answer follows."""
        self._cut_at = len(self._answers)
        self._refused_by = limit

    @property
    def _kept(self) -> list[Trajectory]:
        """Returns the trajectories that have an answer, in the order of their last answers; if none has, the
        first trajectory."""
        numbers = dict[int, None]()
        for taken in self._answers:
            numbers.pop(taken.conversation, None)
            numbers[taken.conversation] = None
        return [self._paths[number] for number in numbers] or [self._paths[0]]

    def _starts(self) -> list[int]:
        """Returns the index of the first token of each kept trajectory."""
        return list(accumulate((len(path.document) for path in self._kept[:-1]), initial=0))

    @property
    def prompt(self) -> Prompt:
        """Returns the prompt at the start of the document."""
        return self._kept[0].prompt

    @property
    def messages(self) -> list[Message]:
        """Returns the messages of the conversation that has the last answer."""
        return self._kept[-1].messages

    @property
    def document(self) -> Document:
        """Returns all conversations up to their last answers; before the first answer, the prompt."""
        documents = [path.document for path in self._kept]
        if len(documents) == 1:
            return documents[0]
        starts = self._starts()
        moved_pictures = [moved(part.pictures, at) for part, at in zip(documents, starts, strict=True)]
        return Document(
            array("i", [token for document in documents for token in document.tokens]),
            array("b", [bool(flag) for document in documents for flag in document.mask]),
            experts=joined_experts([document.experts for document in documents]),
            starts=tuple(starts[1:]),
            pictures=tuple(chain.from_iterable(moved_pictures)),
        )

    @property
    def logprobs(self) -> np.ndarray:
        """Returns the sampler's log-probs (T,), which are 0 outside the mask."""
        return np.concatenate([path.logprobs for path in self._kept])

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Returns pairs of a token index and the version of the weights that sampled the tokens from there
        on."""
        return [
            (start + first, version)
            for start, path in zip(self._starts(), self._kept, strict=True)
            for first, version in path.versions
        ]

    @property
    def turns(self) -> int:
        """Returns the number of answers."""
        return len(self._answers)

    @property
    def conversations(self) -> int:
        """Returns the number of conversations with an answer."""
        return len(self._kept)

    @property
    def finished(self) -> bool:
        """Returns False if a limit on tokens, turns or time ended the episode."""
        return self.ended_by is None

    @property
    def ended_by(self) -> Limit | None:
        """Returns the limit that ended the episode, or None. A limit that prevented an answer takes
        precedence over the token limit that truncated the last answer."""
        if self._cut_at is not None and len(self._answers) <= self._cut_at:
            return self._refused_by
        return None if self._kept[-1].ended else "tokens"

    @property
    def ended(self) -> bool:
        """Returns whether the last answer is complete, even if a limit ended the episode after it."""
        return self._kept[-1].ended

    def early(self, rewards: Sequence[float]) -> np.ndarray | None:
        """Returns the rewards (T,) of all answers but the last, each at its answer's last token; None if all
        of them are 0."""
        if not any(rewards[:-1]):
            return None
        starts = dict(zip(map(id, self._kept), self._starts(), strict=True))
        placed = np.zeros(len(self.document), np.float32)
        for taken, reward in zip(self._answers[:-1], rewards[:-1], strict=True):
            path = self._paths[taken.conversation]
            placed[starts[id(path)] + path.ends[taken.place]] = reward
        return placed


def joined_experts(known: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Joins the experts of several sequences, (T - 1, layers, k) each, inserting -1 (unknown) for the last
    token of every sequence but the last. Returns None if the experts of any sequence are unknown."""
    parts = list[np.ndarray]()
    for experts in known:
        if experts is None:
            return None
        if parts:
            parts.append(np.full((1, *experts.shape[1:]), -1, np.int16))
        parts.append(experts.astype(np.int16))
    return np.concatenate(parts)
