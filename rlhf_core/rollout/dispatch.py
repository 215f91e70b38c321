"""Dispatches requests to running engines one by one, each to the least-loaded engine, and returns answers in
the order they finish.

Each engine has a second call queued while it works on the first, so it never waits for this process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from rlhf_core.cluster.pending import Pending, RankDied
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer, Sampling
from rlhf_core.rollout.sampler_role import SamplerRole

R = TypeVar("R")
SLICE_SECONDS = 0.05  # duration of one call: the longest that a finished answer or a new request waits
CALLS = 2  # per engine


class Background:
    """Runs an event loop in a separate thread, which works while the calling thread waits for something
    else."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="background", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts work in the loop and returns its future, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs work in the loop, waits for its result and returns it."""
        return self.start(work).result()

    def end_work(self) -> None:
        """Cancels all work and keeps the loop running."""

        async def end() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()  # repeated: `wait_for` of Python 3.11 can lose a cancellation
                await asyncio.wait(tasks, timeout=0.1)

        self.run(end())

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Cancels all work and ends the loop."""

        if not self.closed:
            self.end_work()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Engines:
    """Dispatches requests to the engines of a group, within one event loop. `timeout`: how long an engine may
    make no progress, in seconds. `revives`: whether the caller restarts engines that die; otherwise their
    requests fail."""

    def __init__(self, group: WorkerGroup, timeout: float, revives: bool = True):
        self._group = group
        self._timeout = timeout
        self._revives = revives
        self._keys = itertools.count()
        self._new: list[list[Request]] = [[] for _ in range(group.world_size)]
        # requests that nobody waits for any more
        self._gone: list[list[int]] = [[] for _ in range(group.world_size)]
        self._asked: list[dict[int, asyncio.Future[SampledAnswer]]] = [{} for _ in range(group.world_size)]
        self._serving: list[asyncio.Task[None] | None] = [None] * group.world_size
        self._reserved = [0] * group.world_size
        self.version = 0  # of the engines' weights
        self.revivals = 0  # number of times that dead engines came back
        self.dead: set[int] = set()
        self.died = asyncio.Event()
        self._back = asyncio.Event()

    def reserve(self, requests: int = 1) -> int:
        """Returns the engine with the fewest reserved requests, and reserves `requests` more on it until
        `release`."""
        engine = self._least()
        self._reserved[engine] += requests
        return engine

    def release(self, engine: int, requests: int = 1) -> None:
        self._reserved[engine] -= requests

    def _least(self) -> int:
        living = [engine for engine in range(len(self._asked)) if engine not in self.dead]
        return min(living or range(len(self._asked)), key=lambda engine: self._reserved[engine])

    async def ask(
        self,
        engine: int,
        tokens: Sequence[int],
        seed: int,
        sampling: Sampling,
        pictures: Pictures = (),
    ) -> SampledAnswer:
        """Returns one answer from an engine. If the engine dies, asks another engine, or the same engine
        after its restart (see `revived`). Raises RoleFailed when an engine fails in another way, makes no
        progress, or dies for good. Cancelling this call makes the engine abort the request."""
        while True:
            try:
                return await self._ask(engine, tokens, seed, sampling, pictures)
            except RankDied:
                if not self._revives:
                    raise
                engine = self._least()
                if engine in self.dead:
                    await self._back.wait()

    async def _ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Pictures
    ) -> SampledAnswer:
        if engine in self.dead:
            raise RankDied(f"engine {engine} is dead")
        key = next(self._keys)
        future = asyncio.get_running_loop().create_future()
        self._new[engine].append(Request(key, list(tokens), seed, sampling, pictures))
        self._asked[engine][key] = future
        serving = self._serving[engine]
        if serving is None or serving.done():
            self._serving[engine] = asyncio.create_task(self._serve(engine))
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(engine, key)
            raise

    def _give_up(self, engine: int, key: int) -> None:
        """Withdraws a request: drops it if it has not been sent, otherwise makes the engine's next call abort
        it."""
        if self._asked[engine].pop(key, None) is None:
            return  # it was answered, or the engine died
        waiting = [request for request in self._new[engine] if request.key != key]
        if len(waiting) == len(self._new[engine]):
            self._gone[engine].append(key)
        self._new[engine] = waiting

    async def _serve(self, engine: int) -> None:
        """Calls the engine while it has requests."""
        asked = self._asked[engine]
        calls = deque[Pending[list[tuple[int, SampledAnswer]]]]()
        try:
            while asked or self._gone[engine] or calls:
                while (asked or self._gone[engine]) and len(calls) < CALLS:
                    new = self._new[engine]
                    self._new[engine] = []
                    gone = self._gone[engine]
                    self._gone[engine] = []
                    calls.append(
                        self._group.call_rank(
                            engine, "generate", SamplerRole.advance, new, SLICE_SECONDS, gone
                        )
                    )
                for key, answer in (await self._wait(calls.popleft()))[0]:
                    future = asked.pop(key, None)
                    if future is not None and not future.done():  # else nobody waits for the answer
                        future.set_result(answer)
                await asyncio.sleep(0)  # lets callers that got an answer ask again
        except Exception as error:
            if isinstance(error, RankDied):
                again = "are asked again" if self._revives else "fail"
                print(f"engine {engine} died; its {len(asked)} requests {again}: {error}", flush=True)
                await self.lost(engine)
            self._new[engine].clear()
            self._gone[engine].clear()
            for future in asked.values():
                if not future.done():
                    future.set_exception(error)
            asked.clear()

    async def lost(self, engine: int) -> None:
        """Marks an engine as dead: it gets no requests until `revived`."""
        self.dead.add(engine)
        self._back.clear()
        self.died.set()

    async def revived(self) -> None:
        """Marks all dead engines as running again."""
        self.revivals += 1
        self.dead.clear()
        self.died.clear()
        self._back.set()

    async def _wait(
        self, call: Pending[list[tuple[int, SampledAnswer]]]
    ) -> list[list[tuple[int, SampledAnswer]]]:
        return await in_daemon(partial(call.wait, self._timeout), "engine")


async def in_daemon(work: Callable[[], R], name: str) -> R:
    """Returns the result of work that runs in a separate daemon thread, which does not delay the end of this
    process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = done.set_result, work()
        except Exception as error:
            outcome = done.set_exception, error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    Thread(target=run, name=name, daemon=True).start()
    return await done
