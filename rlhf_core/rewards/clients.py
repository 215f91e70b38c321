"""Requests rewards from functions, servers and judges while reward models score. `Client._batch` splits a
batch to find an answer that hangs.

Requests run in threads and are retried after increasing pauses. If all attempts fail, the reward is nan and
counts as failed. Once a source has left more than `allowed` answers without a reward, no more requests are
sent and the run stops with an error that names the source and quotes its last error.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import Verifier
from rlhf_core.config.rewards import (
    EnvironmentReward,
    FunctionReward,
    ModelReward,
    NoReward,
    RewardSource,
)
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import (
    CodeError,
    Reply,
    RewardError,
    Sample,
    SourceRewards,
    Steps,
    WrongReply,
    check_failures,
)

if TYPE_CHECKING:
    from rlhf_core.cluster.ray_cluster import RayNode
    from rlhf_core.judging.chat_client import Chat

LONGEST_PAUSE = 30.0  # seconds between two requests
# number of parts a failed request is split into: an answer that hangs costs max_attempts or log4(batch) + 1
# time limits, whichever is more
PARTS = 4


class RewardBackend(Protocol):
    """Makes a single attempt to get rewards. Raises RewardError if this attempt fails, and ValueError if
    every attempt would fail. `wanted`: the lists of the contract that the source reads."""

    @property
    def wanted(self) -> Collection[str]: ...

    def score(self, samples: Sequence[Sample]) -> Reply: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rewards:
    """The sources' rewards for N answers: (N,) per source, nan where a reward failed; the last error of each
    failing source; and the steps of answers by source and index."""

    by_source: dict[str, np.ndarray]
    errors: dict[str, str]
    steps: Mapping[str, Mapping[int, Steps]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.by_source.values())))

    def take(self, indices: Sequence[int]) -> Rewards:
        place = {index: i for i, index in enumerate(indices)}
        steps = {
            name: {place[i]: found for i, found in by.items() if i in place}
            for name, by in self.steps.items()
        }
        return Rewards(
            {name: values[list(indices)] for name, values in self.by_source.items()}, self.errors, steps
        )

    def check(self, allowed: int) -> None:
        """Raises RewardsFailed when a source leaves more than `allowed` answers without a reward."""
        for name, values in self.by_source.items():
            check_failures(name, int(np.isnan(values).sum()), allowed, len(values), self.errors.get(name, ""))


def join(parts: Sequence[Rewards]) -> Rewards:
    """Returns the concatenation of rewards, in order."""
    names = parts[0].by_source
    errors = {name: error for part in parts for name, error in part.errors.items()}
    steps: dict[str, dict[int, Steps]] = {}
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    for start, part in zip(starts, parts, strict=False):
        for name, by in part.steps.items():
            steps.setdefault(name, {}).update({start + i: found for i, found in by.items()})
    return Rewards(
        {name: np.concatenate([part.by_source[name] for part in parts]) for name in names}, errors, steps
    )


def collect(
    scored: Iterable[tuple[str, ArrayLike]],
    pending: Mapping[str, Future[SourceRewards]],
    allowed: int,
    failures: Mapping[str, str] = MappingProxyType({}),
) -> Rewards:
    """Returns the rewards of all sources: the scores of reward models, given as (title, (N,)), and the
    results of pending requests to other sources. A score that is not finite counts as failed; `failures` maps
    titles to the reason for the failure.

    Raises RewardsFailed when a source leaves more than `allowed` answers without a reward.
    """
    by_source: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    steps: dict[str, Mapping[int, Steps]] = {}
    for title, scores in scored:
        values = np.asarray(scores, dtype=np.float64)
        by_source[title] = np.where(np.isfinite(values), values, np.nan)
        check_failures(
            title, int(np.isnan(by_source[title]).sum()), allowed, len(values), failures.get(title, "")
        )
    for title, future in pending.items():
        by_source[title], error, steps[title] = future.result()
        errors |= {title: error} if error else {}
    return Rewards(by_source, errors, {title: found for title, found in steps.items() if found})


def with_source(rewards: Rewards, title: str, found: SourceRewards) -> Rewards:
    """Returns the rewards with another source's rewards added."""
    errors = {title: found.error} if found.error else {}
    steps = {title: found.steps} if found.steps else {}
    return Rewards(
        {**rewards.by_source, title: found.rewards}, rewards.errors | errors, {**rewards.steps, **steps}
    )


class Client:
    """Sends requests to one function or server. `pause`: maximum length of the first pause between two
    attempts, in seconds."""

    def __init__(
        self,
        title: str,
        source: RewardBackend,
        batch_size: int,
        concurrency: int,
        max_attempts: int,
        pause: float = 1.0,
    ):
        self.title = title
        self._source = source
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._pause = pause
        self._given_up = Event()
        self._rewarded = False  # whether any request got a reward
        # where requests without rewards raised errors in the user's code; "": they failed otherwise
        self._raised = set[str]()
        self.wanted = source.wanted

    def score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards:
        """Returns the rewards of all answers. Raises RewardsFailed when more than `allowed` have none, or
        ValueError if every request so far has raised the same error in the user's code."""
        batches = [samples[i : i + self._batch_size] for i in range(0, len(samples), self._batch_size)]
        rewards = []
        last_error = ""
        failed = 0
        steps = dict[int, Steps]()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix=self.title) as pool:
            work = [pool.submit(self._batch, batch) for batch in batches]
            try:
                for number, done in enumerate(work):
                    values, error, found = done.result()
                    steps |= {number * self._batch_size + i: of_answer for i, of_answer in found.items()}
                    rewards.append(values)
                    last_error = error or last_error
                    failed += int(np.isnan(values).sum())
                    if self._always_raises and failed > allowed:
                        raise ValueError(
                            f"the reward source {self.title}: each request raised {last_error}; correct it,"
                            " then run again"
                        )
                    check_failures(self.title, failed, allowed, len(samples), last_error)
            except BaseException:
                self._given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return SourceRewards(np.concatenate(rewards), last_error, steps)

    @property
    def _always_raises(self) -> bool:
        return not self._rewarded and len(self._raised) == 1 and "" not in self._raised

    def _batch(self, samples: Sequence[Sample]) -> SourceRewards:
        """Returns the rewards of a batch.

        If a whole request fails, each quarter of its answers is requested separately, so that an answer that
        breaks the source is isolated and only its reward is lost. A request that is repeated unsplit gets at
        most `max_attempts` attempts per answer. Isolating one answer by halving takes log2(batch) + 1
        requests; if `max_attempts` more than that fail in a row, the source is considered dead and the
        remaining answers of the batch are given up.
        """
        rewards = np.full(len(samples), np.nan)
        attempts = np.zeros(len(samples), int)
        error = ""
        steps: dict[int, Steps] = {}
        waiting = deque([np.arange(len(samples))])
        in_a_row = 0
        limit = self._max_attempts + len(samples).bit_length()
        while waiting and in_a_row < limit:
            if self._given_up.is_set():
                return SourceRewards(rewards, error or "it gets no more requests", steps)
            part = waiting.popleft()
            attempts[part] += 1
            place = ""
            try:
                reply = self._source.score([samples[i] for i in part.tolist()])
                rewards[part] = reply.rewards
                steps = {i: found for i, found in steps.items() if i not in set(part.tolist())}
                steps |= {int(part[i]): found for i, found in reply.steps.items()}
                again = [part[np.isnan(rewards[part])]]
                problem = "it gave null, nan or no number"
            except WrongReply as failure:
                again = [part]
                problem = str(failure)
            except RewardError as failure:
                again = np.array_split(part, min(PARTS, len(part)))
                problem = str(failure)
                place = failure.place if isinstance(failure, CodeError) else ""
            if len(again) == 1:
                again = [again[0][attempts[again[0]] < self._max_attempts]]
            waiting.extend(smaller for smaller in again if len(smaller))
            missing = np.isnan(rewards[part])
            in_a_row = in_a_row + 1 if missing.all() else 0
            if missing.all():
                self._raised.add(place)
            else:
                self._rewarded = True
            if missing.any():
                error = problem
                if waiting and in_a_row < limit and not place:  # waiting does not fix the user's code
                    growing = self._pause * 2 ** min(max(0, in_a_row - 1), 10)
                    self._given_up.wait(random.uniform(0, min(LONGEST_PAUSE, growing)))
        return SourceRewards(rewards, error if np.isnan(rewards).any() else "", steps)

    def spent(self) -> Mapping[str, float]:
        """Returns no metrics, because the cost of functions and servers is not known."""
        return {}

    def close(self) -> None:
        """Ends all requests. The answers of open requests then get no reward."""
        self._given_up.set()
        self._source.close()


class SourceClient(Protocol):
    """The interface of `Client` and `JudgeClient`, which get the rewards of one source. `spent` returns
    metrics of the resources that requests have used since it was last called."""

    title: str

    @property
    def wanted(self) -> Collection[str]: ...

    def score(self, samples: Sequence[Sample], allowed: int) -> SourceRewards: ...

    def spent(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


def client_of(
    source: RewardSource,
    others: Sequence[RayNode] = (),
    cache: Path | None = None,
    group: int = 1,
    chat: Chat | None = None,
) -> SourceClient:
    """Returns a client for a recipe's function, server, verifier or judge. `others`: additional nodes on
    which a function runs. `cache`: folder for a judge's verdicts. `group`: number of consecutive answers per
    prompt. `chat`: sends requests to a judge on the stage's engines. Raises ValueError when the server's key
    is not set."""
    if isinstance(source, JudgeReward):
        from rlhf_core.rewards.judge.judge_client import JudgeClient  # importing its library takes a second

        place = None if cache is None else cache / f"{source.title}.jsonl"
        return JudgeClient(source, place, group, chat=chat)
    assert not isinstance(source, ModelReward | EnvironmentReward | NoReward), "these need no client"
    ready: RewardBackend
    if isinstance(source, FunctionReward | Verifier):
        seconds = source.request_seconds if isinstance(source, Verifier) else source.timeout
        options = source.options if isinstance(source, Verifier) else {}
        called = source.file, source.function_name, seconds, source.concurrency
        if others:
            from rlhf_core.rewards.functions.function_nodes import SpreadFunction  # imports Ray

            ready = SpreadFunction(*called, others, options)
        else:
            ready = Function(*called, options)
    else:
        if source.api_key_env and not os.environ.get(source.api_key_env):
            raise ValueError(
                f"the reward {source.title} needs a key in the environment variable {source.api_key_env}:"
                " set it"
            )
        ready = HttpRewardClient(source.url, source.timeout, source.api_key_env)
    return Client(source.title, ready, source.batch_size, source.concurrency, source.max_attempts)


class Clients:
    """Queries all functions, servers and judges of a stage in parallel."""

    def __init__(self, clients: Sequence[SourceClient]):
        self._clients = clients
        self._pool = ThreadPoolExecutor(max(1, len(clients)))

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def wanted(self) -> set[str]:
        """Returns the lists of the contract that at least one client reads."""
        return {name for client in self._clients for name in client.wanted}

    def start(self, samples: Sequence[Sample], allowed: int) -> dict[str, Future[SourceRewards]]:
        """Starts the requests and returns the futures of their results, keyed by source."""
        return {client.title: self._pool.submit(client.score, samples, allowed) for client in self._clients}

    def spent(self) -> dict[str, float]:
        """Returns metrics of the resources that requests have used since the last call."""
        return {name: value for client in self._clients for name, value in client.spent().items()}

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._pool.shutdown()
