"""Sends chat requests to engines of this run, for judges; implements `Chat`.

Requests and replies travel as tokens in calls of Ray actors: no port is opened. Control tokens typed in a
judged text stay text. All requests are sent to the engines at the same time, and the engines batch them. An
engine that dies or makes no progress fails the stage, as any other role's process does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TypeVar

from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.judging.chat_client import ChatReply, Unanswerable
from rlhf_core.rollout.chat_models import JudgeSetup
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.rollout.sampler_role import SamplerRole

Item = TypeVar("Item")
Found = TypeVar("Found")


class EngineChat:
    """Asks the model of a group of engines, with greedy sampling.

    `start` returns the group once its engines have loaded; it is called before the first request. `timeout`:
    how long an engine may make no progress, in seconds. With `sleep`, the engines share GPUs and sleep
    outside of `each`.
    """

    def __init__(self, setup: JudgeSetup, start: Callable[[], WorkerGroup], timeout: float):
        max_tokens = setup.judge.max_tokens
        self.asked: Mapping[str, int] = {"max_tokens": max_tokens, "temperature": 0}
        self.requests = 0
        self._start = start
        self._renderer = setup.renderer
        self._longest: int = setup.options["max_model_len"]
        self._sampling = Sampling(1, 0.0, max_tokens, setup.renderer.stop_token_ids, logprobs=False)
        self._sleeps = setup.judge.engine.sleep
        self._timeout = timeout
        self._group: WorkerGroup | None = None
        self._background = Background()
        self._engines: Engines | None = None
        self._stopped = False

    def started(self) -> WorkerGroup:
        """Returns the group once its engines have loaded; if they share GPUs, they are put to sleep."""
        if self._group is None:
            self._group = self._start()
            self._engines = Engines(self._group, self._timeout, revives=False)
            if self._sleeps:
                self._group.call("sleep", SamplerRole.sleep, True).wait(self._timeout)
        return self._group

    def each(
        self,
        items: Mapping[str, Item],
        work: Callable[[Item], Awaitable[Found]],
        done: Callable[[str, Found], None],
    ) -> None:
        """Calls `work` for every item, and `done` with each key and result as it completes. An exception in
        either function cancels all work. Raises CancelledError after `stop`, and RoleFailed when an engine
        fails."""
        if not items:
            return
        if self._stopped:
            raise asyncio.CancelledError
        group = self.started()
        if self._sleeps:
            group.call("wake", SamplerRole.wake).wait(self._timeout)
        try:
            self._background.run(_each(items, work, done))
        except (CancelledError, RuntimeError):  # RuntimeError: the loop may be closed
            if self._stopped:
                raise asyncio.CancelledError from None
            raise
        if self._sleeps:
            group.call("sleep", SamplerRole.sleep, True).wait(self._timeout)

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> ChatReply:
        """Sends messages and returns the reply. Must be called inside `each`. Raises Unanswerable for
        messages that the model cannot read."""
        engines = self._engines
        assert engines is not None, "each has started them"
        try:
            tokens = self._renderer.prompt([dict(message) for message in messages])
        except ValueError as error:
            raise Unanswerable(str(error)) from None
        most = self._sampling.max_new_tokens
        if len(tokens) + most > self._longest:
            raise Unanswerable(
                f"the request has {len(tokens)} tokens, and with max_tokens={most} that is more than the"
                f" {self._longest} that the judge can take"
            )
        self.requests += 1
        engine = engines.reserve()
        try:
            answer = await engines.ask(engine, tokens, 0, self._sampling)
        finally:
            engines.release(engine)
        return ChatReply(
            text=self._renderer.decoded(answer.tokens, True),
            input_tokens=len(tokens),
            output_tokens=len(answer.tokens),
            cut=not answer.finished,
        )

    def reason(self, error: Exception) -> str:
        """Returns the reason why there is no reply, in parentheses."""
        return f"(no reply: {error})"

    def stop(self) -> None:
        """Cancels open requests and rejects new requests. May be called from any thread."""
        self._stopped = True
        self._background.close()


async def _each(
    items: Mapping[str, Item],
    work: Callable[[Item], Awaitable[Found]],
    done: Callable[[str, Found], None],
) -> None:
    async def one(key: str, item: Item) -> None:
        done(key, await work(item))

    tasks = [asyncio.ensure_future(one(key, item)) for key, item in items.items()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
