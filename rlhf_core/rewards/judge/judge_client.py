"""Gets rewards from a judge, which is a chat model at an OpenAI-compatible endpoint or on engines of this
run.

`opinions.py` chooses the requests to the judge. Every verdict is cached as soon as it arrives, under a key of
the request, the judge's name and the prompt's version, so that a resumed stage does not pay twice for a
verdict. A reply without a verdict is followed by one reminder. A request that still has no verdict is not
cached; an answer without a verdict has a failed reward, which is never 0. Requests and retries are in
`rlhf_core/judging/chat_client.py`, requests to engines in `rlhf_core/rollout/engine_chat.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from rlhf_core.config.rewarding.judge_models import RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.judging.chat_client import NO_REPLY, Chat, ChatClient, ChatReply, cost_of, remote
from rlhf_core.judging.marked_reply import MarkedReply
from rlhf_core.judging.record_lines import appending, records_of
from rlhf_core.records import Frozen
from rlhf_core.rewards.judge.comparison_prompt import LABELS, read_comparison
from rlhf_core.rewards.judge.opinions import JudgeRequest, plan_of, rewards_of
from rlhf_core.rewards.judge.rating_prompt import PROMPT_VERSION, Messages, form_of, reminder
from rlhf_core.rewards.judge.rating_reply import Rating, read_rating
from rlhf_core.rewards.reward_contract import RewardsFailed, Sample, SourceRewards, check_failures
from rlhf_core.system.files import digest


class StoredVerdict(Frozen):
    """One line of the cache. `verdict`: the numbers of a rating, or the points of answer A. `reply`: the text
    of the judge's reply, including its reasons."""

    key: str
    verdict: Rating
    reply: str


class GivenVerdict(NamedTuple):
    """A judge's verdict with the text of its reply, or None and the reason why it gave no verdict."""

    verdict: Rating | None
    words: str


class JudgeClient:
    """Judges answers, with `group` consecutive answers per prompt. `cache`: file of verdicts; None: they are
    kept in memory. `pause`: scales the pauses between two attempts, in seconds. `chat`: sends requests to a
    judge on the stage's engines; None: the judge is behind an endpoint."""

    wanted = frozenset(("prompts", "responses", "rows"))

    def __init__(
        self,
        source: JudgeReward,
        cache: Path | None = None,
        group: int = 1,
        pause: float = 1.0,
        chat: Chat | None = None,
    ):
        self.title = source.title
        self._source = source
        self._cache = cache
        self._group = group
        self._client = endpoint_of(source, pause) if chat is None else chat
        lines = records_of(cache, StoredVerdict) if cache is not None else ()
        self._known: dict[str, Rating] = {line.key: line.verdict for line in lines}
        self._turn = Lock()  # one `score` at a time: the client's limits are for all calls together
        self._counting = Lock()
        self._used = {"requests": 0, "input_tokens": 0, "output_tokens": 0}

    def score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards:
        """Returns the rewards of all answers, (N,). Raises RewardsFailed when more than `allowed` answers
        have no reward, and ValueError when the endpoint rejects all requests."""
        with self._turn:
            return self._score(samples, allowed)

    def _score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards:
        plan = plan_of(self._source, samples, self._group, self._key)
        error = plan.problem
        failed: set[str] = set()
        check_failures(self.title, plan.without(failed), allowed, len(samples), error)
        missing = {key: asked for key, asked in plan.requests.items() if key not in self._known}
        sent = self._client.requests
        try:
            with appending(self._cache) if self._cache is not None else nullcontext() as file:

                def done(key: str, given: GivenVerdict) -> None:
                    nonlocal error
                    if given.verdict is None:
                        failed.add(key)
                        error = given.words
                        check_failures(self.title, plan.without(failed), allowed, len(samples), error)
                        return
                    self._known[key] = given.verdict
                    if file is not None:
                        line = StoredVerdict(key=key, verdict=given.verdict, reply=given.words)
                        file.write(line.model_dump_json() + "\n")
                        file.flush()

                self._client.each(missing, self._ask, done)
        except asyncio.CancelledError:
            raise RewardsFailed(f"the reward source {self.title} gets no more requests") from None
        finally:
            self._count(requests=self._client.requests - sent)
        rewards = rewards_of(self._source, plan, self._known)
        return SourceRewards(rewards, error if np.isnan(rewards).any() else "", {})

    def _key(self, messages: Messages) -> str:
        return digest([list(messages), self._client.asked, self._source.judge.model, PROMPT_VERSION])

    async def _ask(self, asked: JudgeRequest) -> GivenVerdict:
        """Asks for a verdict, with at most one reminder."""
        try:
            reply = await self._reply(asked.messages)
            found = self._read(asked, reply)
            words = reply.text
            if found.value is None:
                first = ({"role": "assistant", "content": words},) if words.strip() else ()
                again = reminder(self._form, found.problem)
                reply = await self._reply((*asked.messages, *first, again))
                found = self._read(asked, reply)
                words = f"{words}\n{reply.text}"
        except NO_REPLY as error:
            return GivenVerdict(None, self._client.reason(error))
        if found.value is None:
            return GivenVerdict(None, f"(no verdict: {found.problem})")
        return GivenVerdict(found.value, words)

    def _read(self, asked: JudgeRequest, reply: ChatReply) -> MarkedReply[Rating]:
        if self._source.compare != "none":
            return read_comparison(reply.text, asked.texts, reply.cut)
        return read_rating(self._source, reply.text, asked.texts, reply.cut)

    @property
    def _form(self) -> str:
        return form_of(self._source) if self._source.compare == "none" else LABELS

    async def _reply(self, messages: Messages) -> ChatReply:
        reply = await self._client.ask(messages)
        self._count(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
        return reply

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, count in more.items():
                self._used[name] += count

    def spent(self) -> Mapping[str, float]:
        """Returns requests, tokens and cost (in US dollars, if the prices are known) since the last call, as
        metrics."""
        with self._counting:
            used = self._used
            self._used = dict.fromkeys(used, 0)
        metrics = {f"reward/{self.title}/{name}": float(count) for name, count in used.items()}
        judge = self._source.judge
        if not isinstance(judge, RatingModel):
            return metrics
        cost = cost_of(judge, used["input_tokens"], used["output_tokens"])
        return metrics if cost is None else {**metrics, f"reward/{self.title}/cost": cost}

    def close(self) -> None:
        """Ends open requests and prevents new requests."""
        self._client.stop()


def endpoint_of(source: JudgeReward, pause: float) -> Chat:
    """Returns the client that sends requests to a judge behind an endpoint."""
    judge = source.judge
    assert isinstance(judge, RatingModel), "the stage starts the engines of other judges"
    settings = {"max_tokens": judge.max_tokens, "temperature": 0}
    connect = partial(remote, judge)
    return ChatClient(f"the reward {source.title}", judge.model, connect, settings, judge, pause)
