"""Gets rewards from a judge, a chat model at an OpenAI-compatible endpoint.

Every rating is cached when it arrives, by the request, the judge's name and the prompt's version, so that a
resumed stage pays for none twice. A reply without a verdict is followed by one reminder. What still has no
verdict is a failed reward, which is never 0 and is not cached. Requests and retries:
`rlhf_core/judging/chat_client.py`.
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

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.judging.chat_client import NO_REPLY, ChatClient, ChatReply, cost_of, remote
from rlhf_core.judging.record_lines import appending, records_of
from rlhf_core.records import Frozen
from rlhf_core.rewards.judge.rating_prompt import (
    PROMPT_VERSION,
    Messages,
    rating_prompt,
    reminder,
    texts_of,
)
from rlhf_core.rewards.judge.rating_reply import Rating, read_rating, reward_of
from rlhf_core.rewards.reward_contract import RewardsFailed, Sample, SourceRewards, check_failures
from rlhf_core.system.files import digest

CACHE = "judge_cache"  # folder of a run directory


class CachedRating(Frozen):
    """One line of the cache. `reply`: the judge's words, its reasons included."""

    key: str
    rating: Rating
    reply: str


class RatingRequest(NamedTuple):
    """What a judge is asked about an answer. `texts`: what it reads, to tell its words from theirs."""

    messages: Messages
    texts: Sequence[str]


class GivenRating(NamedTuple):
    """A judge's rating (None: it gave none) with its words, or the reason why there is none."""

    rating: Rating | None
    words: str


class JudgeClient:
    """Rates answers with a judge. `cache`: file of ratings; None keeps them in memory. `pause`: scales the
    pauses between two attempts, in seconds."""

    wanted = frozenset(("prompts", "responses", "rows"))

    def __init__(self, source: JudgeReward, cache: Path | None = None, pause: float = 1.0):
        self.title = source.title
        self._source = source
        self._cache = cache
        self._client = ChatClient(
            f"the reward {source.title}",
            source.judge.model,
            partial(remote, source.judge),
            {"max_tokens": source.judge.max_tokens, "temperature": 0},
            source.judge,
            pause,
        )
        lines = records_of(cache, CachedRating) if cache is not None else ()
        self._known: dict[str, Rating] = {line.key: line.rating for line in lines}
        self._turn = Lock()  # one call of `score` at a time: the client's limits hold for all of them
        self._counting = Lock()
        self._used = {"requests": 0, "input_tokens": 0, "output_tokens": 0}

    def score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards:
        """Returns the rewards of all answers, (N,). Raises RewardsFailed when more than `allowed` have none,
        ValueError when the endpoint refuses all requests."""
        with self._turn:
            return self._score(samples, allowed)

    def _score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards:
        questions: dict[str, RatingRequest] = {}
        keys: list[str | None] = []
        error = ""
        for sample in samples:
            try:
                question = self._question(sample)
            except ValueError as problem:
                keys.append(None)
                error = str(problem)
                continue
            keys.append(self._key(question))
            questions[self._key(question)] = question
        failed = keys.count(None)
        check_failures(self.title, failed, allowed, len(samples), error)
        missing = {key: question for key, question in questions.items() if key not in self._known}
        sent = self._client.requests
        try:
            with appending(self._cache) if self._cache is not None else nullcontext() as file:

                def done(key: str, given: GivenRating) -> None:
                    nonlocal failed, error
                    if given.rating is None:
                        failed += keys.count(key)
                        error = given.words[-200:].strip()
                        check_failures(self.title, failed, allowed, len(samples), error)
                        return
                    self._known[key] = given.rating
                    if file is not None:
                        line = CachedRating(key=key, rating=given.rating, reply=given.words)
                        file.write(line.model_dump_json() + "\n")
                        file.flush()

                self._client.each(missing, self._ask, done)
        except asyncio.CancelledError:
            raise RewardsFailed(f"the reward source {self.title} gets no more requests") from None
        finally:
            self._count(requests=self._client.requests - sent)
        ratings = [None if key is None else self._known.get(key) for key in keys]
        rewards = [np.nan if rating is None else reward_of(self._source, rating) for rating in ratings]
        return SourceRewards(np.array(rewards, dtype=np.float64), error, {})

    def _question(self, sample: Sample) -> RatingRequest:
        texts = [text for _, text in texts_of(self._source, sample)]
        return RatingRequest(rating_prompt(self._source, sample), texts)

    def _key(self, question: RatingRequest) -> str:
        asked = [list(question.messages), self._client.asked, self._source.judge.model, PROMPT_VERSION]
        return digest(asked)

    async def _ask(self, question: RatingRequest) -> GivenRating:
        """Asks for a rating, with one reminder."""
        try:
            reply = await self._reply(question.messages)
            found = read_rating(self._source, reply.text, question.texts, reply.cut)
            words = reply.text
            if found.value is None:
                first = ({"role": "assistant", "content": words},) if words.strip() else ()
                again = reminder(self._source, found.problem)
                reply = await self._reply((*question.messages, *first, again))
                found = read_rating(self._source, reply.text, question.texts, reply.cut)
                words = f"{words}\n{reply.text}"
        except NO_REPLY as error:
            return GivenRating(None, self._client.reason(error))
        if found.value is None:
            return GivenRating(None, f"(no verdict: {found.problem})")
        return GivenRating(found.value, words)

    async def _reply(self, messages: Messages) -> ChatReply:
        reply = await self._client.ask(messages)
        self._count(input_tokens=reply.input_tokens, output_tokens=reply.output_tokens)
        return reply

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, count in more.items():
                self._used[name] += count

    def spent(self) -> Mapping[str, float]:
        """Returns requests, tokens and cost (US dollars, if the prices are known) since the last call, as
        metrics."""
        with self._counting:
            used = self._used
            self._used = dict.fromkeys(used, 0)
        metrics = {f"reward/{self.title}/{name}": float(count) for name, count in used.items()}
        cost = cost_of(self._source.judge, used["input_tokens"], used["output_tokens"])
        return metrics if cost is None else {**metrics, f"reward/{self.title}/cost": cost}

    def close(self) -> None:
        """Ends open requests and prevents new ones."""
        self._client.stop()
