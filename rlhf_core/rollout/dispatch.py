"""Gives requests to running engines one by one, each to the engine with the least to do, and answers them in the order they are finished.

Each engine always has a second call waiting while it works on the first, so that it never waits for this process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlhf_core.cluster.worker_group import Group, Pending
from rlhf_core.rollout.engine import Answer, Request, Sampling
from rlhf_core.rollout.sampler_role import SamplerRole

SLICE_SECONDS = 0.05  # of one call: how long a finished answer or a new request waits at most
CALLS = 2  # per engine


class Engines:
    """Gives requests to the engines of a group; made and used in one event loop. `timeout`: seconds that an engine may make no progress."""

    def __init__(self, group: Group, timeout: float):
        self._group, self._timeout = group, timeout
        self._threads = ThreadPoolExecutor(group.world_size, thread_name_prefix="engine")
        self._keys = itertools.count()
        self._new: list[list[Request]] = [[] for _ in range(group.world_size)]
        self._asked: list[dict[int, asyncio.Future[Answer]]] = [{} for _ in range(group.world_size)]
        self._serving: list[asyncio.Task[None] | None] = [None] * group.world_size

    def least_busy(self) -> int:
        """Returns the engine with the fewest requests."""
        return min(range(len(self._asked)), key=lambda engine: len(self._asked[engine]))

    async def ask(self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling) -> Answer:
        """Asks an engine for one answer. Raises RoleFailed when the engine dies or makes no progress."""
        key, future = next(self._keys), asyncio.get_running_loop().create_future()
        self._new[engine].append(Request(key, list(tokens), seed, sampling))
        self._asked[engine][key] = future
        serving = self._serving[engine]
        if serving is None or serving.done():
            self._serving[engine] = asyncio.create_task(self._serve(engine))
        return await future

    async def _serve(self, engine: int) -> None:
        """Calls the engine as long as it has requests."""
        asked, calls = self._asked[engine], deque[Pending[list[tuple[int, Answer]]]]()
        try:
            while asked or calls:
                while asked and len(calls) < CALLS:
                    new, self._new[engine] = self._new[engine], []
                    calls.append(self._group.call_rank(engine, "generate", SamplerRole.advance, new, SLICE_SECONDS))
                for key, answer in (await self._wait(calls.popleft()))[0]:
                    if not (future := asked.pop(key)).done():  # else who asked is gone
                        future.set_result(answer)
                await asyncio.sleep(0)  # those who got an answer may ask again
        except Exception as error:
            for future in asked.values():
                if not future.done():
                    future.set_exception(error)
            asked.clear()

    async def _wait(self, call: Pending[list[tuple[int, Answer]]]) -> list[list[tuple[int, Answer]]]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call.wait, self._timeout)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
