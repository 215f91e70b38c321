"""Asks functions and servers for the rewards of a rollout while models score it: batches, threads, retries with growing pauses.

What no attempt could give is nan and counted. Once a source has left more than `allowed` answers without a reward, nothing more is asked
and the run stops with the source's name and its last error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from tenacity import Retrying, retry_if_result, sleep_using_event, stop_after_attempt, stop_when_event_set, wait_random_exponential

from rlhf_core.reward_sources import FunctionReward, HttpReward, RewardSource
from rlhf_core.rewards.contract import RewardError, RewardsFailed, Sample
from rlhf_core.rewards.function import Function
from rlhf_core.rewards.remote import Server

LONGEST_PAUSE = 30.0  # seconds between two attempts


class Source(Protocol):
    """One attempt: (N,) rewards, nan where one failed. RewardError: this attempt failed; ValueError: every one would."""

    def ask(self, samples: Sequence[Sample]) -> np.ndarray: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rewards:
    """What the sources say of N answers: (N,) each, nan where a source failed; and each failing source's last error."""

    by_source: dict[str, np.ndarray]
    errors: dict[str, str]

    def __len__(self) -> int:
        return len(next(iter(self.by_source.values())))

    def take(self, indices: Sequence[int]) -> Rewards:
        return Rewards({name: values[list(indices)] for name, values in self.by_source.items()}, self.errors)

    def failed(self) -> dict[str, int]:
        """Answers without a reward, by source."""
        return {name: int(np.isnan(values).sum()) for name, values in self.by_source.items()}


def join(parts: Sequence[Rewards]) -> Rewards:
    """The answers of all parts, in order."""
    names = parts[0].by_source
    errors = {name: error for part in parts for name, error in part.errors.items()}
    return Rewards({name: np.concatenate([part.by_source[name] for part in parts]) for name in names}, errors)


def collect(scored: Iterable[tuple[str, ArrayLike]], asked: Mapping[str, Future[tuple[np.ndarray, str]]], allowed: int) -> Rewards:
    """What reward models scored, (title, (N,)) each, and what is being asked outside; a score that is not finite has failed.

    RewardsFailed when a source left more than `allowed` answers without a reward.
    """
    by_source: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    for title, scores in scored:
        values = np.asarray(scores, dtype=np.float64)
        by_source[title] = np.where(np.isfinite(values), values, np.nan)
        check_failures(title, int(np.isnan(by_source[title]).sum()), allowed, len(values), "")
    for title, future in asked.items():
        by_source[title], error = future.result()
        errors |= {title: error} if error else {}
    return Rewards(by_source, errors)


class Asker:
    """One function or server. `pause` seconds is the scale of the first pause between two attempts."""

    def __init__(self, title: str, source: Source, batch_size: int, concurrency: int, max_attempts: int, pause: float = 1.0):
        self.title, self._source = title, source
        self._batch_size, self._concurrency, self._max_attempts = batch_size, concurrency, max_attempts
        self._wait = wait_random_exponential(multiplier=pause, max=LONGEST_PAUSE)
        self._given_up = Event()

    def ask(self, samples: Sequence[Sample], allowed: int) -> tuple[np.ndarray, str]:
        """Rewards (N,), nan where one failed, and the last error. RewardsFailed when more than `allowed` did."""
        batches = [samples[i : i + self._batch_size] for i in range(0, len(samples), self._batch_size)]
        rewards, last_error, failed = [], "", 0
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix=self.title) as pool:
            work = [pool.submit(self._batch, batch) for batch in batches]
            try:
                for done in work:
                    values, error = done.result()
                    rewards.append(values)
                    last_error = error or last_error
                    failed += int(np.isnan(values).sum())
                    check_failures(self.title, failed, allowed, len(samples), last_error)
            except BaseException:
                self._given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return np.concatenate(rewards), last_error

    def _batch(self, samples: Sequence[Sample]) -> tuple[np.ndarray, str]:
        """A batch after as many attempts as allowed; each asks only for what is still missing."""
        rewards, error = np.full(len(samples), np.nan), ""
        if self._given_up.is_set():
            return rewards, "it is not asked any more"

        def attempt() -> bool:
            nonlocal error
            missing = np.flatnonzero(np.isnan(rewards))
            try:
                rewards[missing] = self._source.ask([samples[i] for i in missing])
                error = "it gave null, nan or no number" if np.isnan(rewards).any() else ""
            except RewardError as problem:
                error = str(problem)
            return not np.isnan(rewards).any()

        retrying = Retrying(
            retry=retry_if_result(lambda whole: not whole),
            stop=stop_after_attempt(self._max_attempts) | stop_when_event_set(self._given_up),
            wait=self._wait,
            sleep=sleep_using_event(self._given_up),
            retry_error_callback=lambda state: False,
        )
        retrying(attempt)
        return rewards, error

    def close(self) -> None:
        """Ends what is being asked too: its answers go without a reward."""
        self._given_up.set()
        self._source.close()


def asker(source: RewardSource) -> Asker:
    """A function or server of a recipe, ready to be asked. ValueError when its key is not set."""
    assert isinstance(source, FunctionReward | HttpReward), "a reward model is a group of the cluster"
    if isinstance(source, FunctionReward):
        ready: Source = Function(source.file, source.function_name, source.timeout, source.concurrency)
    else:
        if source.api_key_env and not os.environ.get(source.api_key_env):
            raise ValueError(f"the reward {source.title} needs a key in the environment variable {source.api_key_env}: set it")
        ready = Server(source.url, source.timeout, source.api_key_env)
    return Asker(source.title, ready, source.batch_size, source.concurrency, source.max_attempts)


def check_failures(title: str, failed: int, allowed: int, asked: int, error: str) -> None:
    """Raises RewardsFailed when more than `allowed` answers have no reward."""
    if failed > allowed:
        raise RewardsFailed(
            f"the reward source {title} left {failed} of {asked} answers without a reward, more than the {allowed} that max_failed_rewards "
            f"allows (the last error: {error or 'a score that is not finite'}); look at the source, then run again"
        )


class Outside:
    """All functions and servers of a stage, asked side by side."""

    def __init__(self, askers: Sequence[Asker]):
        self._askers = askers
        self._pool = ThreadPoolExecutor(max(1, len(askers)))

    def __len__(self) -> int:
        return len(self._askers)

    def start(self, samples: Sequence[Sample], allowed: int) -> dict[str, Future[tuple[np.ndarray, str]]]:
        """Begins to ask; the results by source."""
        return {asker.title: self._pool.submit(asker.ask, samples, allowed) for asker in self._askers}

    def close(self) -> None:
        for asker in self._askers:
            asker.close()
        self._pool.shutdown()
