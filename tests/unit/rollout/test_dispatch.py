"""Requests to several engines: each gets its share, also of what is asked at one moment; those of a dead one
go to another, and those that nobody waits for are aborted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import pytest

from rlhf_core.cluster.pending import RankDied, RoleFailed
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine_contract import Request, SampledAnswer, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, max_new_tokens=5, stop_token_ids=[])


class Group:
    """In place of a group of engines: each answers at once; `dead` ones raise."""

    def __init__(self, engines: int):
        self.world_size = engines
        self.dead = set[int]()
        self.broken = False
        self.answered = Counter[int]()

    def call_rank(
        self,
        rank: int,
        phase: str,
        method: Any,
        requests: Sequence[Request],
        seconds: float,
        gone: Sequence[int],
    ) -> Any:
        group = self

        class Work:
            def wait(self, timeout: float) -> list[list[tuple[int, SampledAnswer]]]:
                if rank in group.dead:
                    raise RankDied(f"engine {rank} died")
                if group.broken:
                    raise RoleFailed("no progress")
                group.answered[rank] += len(requests)
                return [[(request.key, SampledAnswer([rank], [0.0], True)) for request in requests]]

        return Work()


def ask(engines: Engines, count: int) -> Any:
    async def one() -> int:
        engine = engines.reserve()
        try:
            return (await engines.ask(engine, [1], 0, SAMPLING)).tokens[0]
        finally:
            engines.release(engine)

    async def work() -> list[int]:
        return await asyncio.gather(*(one() for _ in range(count)))

    return work()


@pytest.fixture
def background() -> Any:
    made = Background()
    yield made
    made.close()


def test_what_is_asked_at_once_is_shared_out(background: Background) -> None:
    group = Group(4)
    background.run(ask(Engines(group, 10.0), 64))  # type: ignore[arg-type]
    assert group.answered == {engine: 16 for engine in range(4)}


def test_requests_of_a_dead_engine_go_to_another(background: Background) -> None:
    group = Group(2)
    group.dead = {0}
    engines = Engines(group, 10.0)  # type: ignore[arg-type]
    assert set(background.run(ask(engines, 10))) == {1} and engines.dead == {0} and engines.died.is_set()


def test_requests_wait_for_the_only_engine(background: Background) -> None:
    group = Group(1)
    group.dead = {0}
    engines = Engines(group, 10.0)  # type: ignore[arg-type]
    waiting = background.start(ask(engines, 3))
    background.run(engines.died.wait())  # type: ignore[arg-type]
    assert not waiting.done()
    group.dead = set()
    background.run(engines.revived())
    assert waiting.result(timeout=60) == [0, 0, 0]


def test_an_engine_that_others_found_dead_gets_nothing(background: Background) -> None:
    engines = Engines(Group(1), 10.0)  # type: ignore[arg-type]
    background.run(engines.revived())  # as after an earlier death
    background.run(engines.lost(0))
    waiting = background.start(ask(engines, 2))
    background.run(asyncio.sleep(0.05))
    assert not waiting.done()
    background.run(engines.revived())
    assert waiting.result(timeout=60) == [0, 0]


def test_other_failures_are_told(background: Background) -> None:
    group = Group(1)
    group.broken = True
    with pytest.raises(RoleFailed, match="no progress"):
        background.run(ask(Engines(group, 10.0), 3))  # type: ignore[arg-type]


class Slow(Group):
    """Stands for an engine: answers a request when the test allows it, and keeps the others for the next call,
    as `RolloutEngine.advance` does."""

    def __init__(self) -> None:
        super().__init__(1)
        self.running = set[int]()
        self.seen = list[int]()
        self.aborted = list[int]()
        self.answers = False
        self.works = Event()  # calls wait while it is not set
        self.works.set()
        self.held = False  # whether a call has waited for it

    def call_rank(
        self,
        rank: int,
        phase: str,
        method: Any,
        requests: Sequence[Request],
        seconds: float,
        gone: Sequence[int] = (),
    ) -> Any:
        group = self

        class Work:
            def wait(self, timeout: float) -> list[list[tuple[int, SampledAnswer]]]:
                time.sleep(0.002)
                while not group.works.is_set():
                    group.held = True
                    time.sleep(0.002)
                group.seen += [request.key for request in requests]
                group.running |= {request.key for request in requests}
                group.aborted += [key for key in gone if key in group.running]
                group.running -= set(gone)
                finished = sorted(group.running) if group.answers else []
                group.running -= set(finished)
                return [[(key, SampledAnswer([key], [0.0], True)) for key in finished]]

        return Work()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_request_is_aborted_when_nobody_waits_for_it(background: Background) -> None:
    """Also the last one, after which nothing else is asked; others are answered."""
    group = Slow()
    engines = Engines(group, 10.0)  # type: ignore[arg-type]

    async def work() -> SampledAnswer:
        asking = [asyncio.create_task(engines.ask(0, [1], 0, SAMPLING)) for _ in range(3)]
        await until(lambda: len(group.running) == 3)
        asking[1].cancel()
        await until(lambda: group.aborted == [1])
        assert group.running == {0, 2} and not asking[0].done()
        group.answers = True
        answer = await asking[2]
        group.answers = False
        last = asyncio.create_task(engines.ask(0, [1], 0, SAMPLING))
        await until(lambda: group.running == {3})
        last.cancel()
        await until(lambda: not group.running)
        await until(lambda: engines._serving[0] is None or engines._serving[0].done())
        return answer

    assert background.run(work()).tokens == [2] and group.aborted == [1, 3]


def test_a_request_that_was_not_sent_yet_never_is(background: Background) -> None:
    group = Slow()
    engines = Engines(group, 10.0)  # type: ignore[arg-type]

    async def work() -> None:
        first = asyncio.create_task(engines.ask(0, [1], 0, SAMPLING))
        await until(lambda: group.running == {0})
        group.works.clear()
        await until(lambda: group.held)  # all calls of the engine are under way
        others = [asyncio.create_task(engines.ask(0, [1], 0, SAMPLING)) for _ in range(2)]
        await asyncio.sleep(0.01)
        others[0].cancel()
        await asyncio.sleep(0.01)
        group.answers = True
        group.works.set()
        await asyncio.gather(first, others[1])

    background.run(work())
    assert group.seen == [0, 2] and group.aborted == []


def test_an_answer_that_comes_with_the_abort_is_dropped(background: Background) -> None:
    group = Slow()
    engines = Engines(group, 10.0)  # type: ignore[arg-type]

    async def work() -> SampledAnswer:
        first = asyncio.create_task(engines.ask(0, [1], 0, SAMPLING))
        await until(lambda: group.running == {0})
        group.answers = True
        first.cancel()
        return await engines.ask(0, [1], 0, SAMPLING)

    assert background.run(work()).tokens == [1]
