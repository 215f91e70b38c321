"""Requests to several engines: each gets its share, also of what is asked at one moment; those of a dead one go to another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_core.cluster.worker_group import RankDied, RoleFailed
from rlhf_core.rollout.dispatch import Background, Engines
from rlhf_core.rollout.engine import Answer, Request, Sampling

SAMPLING = Sampling(n=1, temperature=1.0, max_new_tokens=5, stop_token_ids=[])


class Group:
    """In place of a group of engines: each answers at once; `dead` ones raise."""

    def __init__(self, engines: int):
        self.world_size, self.dead, self.broken = engines, set[int](), False
        self.answered = Counter[int]()

    def call_rank(self, rank: int, phase: str, method: Any, requests: Sequence[Request], seconds: float) -> Any:
        group = self

        class Work:
            def wait(self, timeout: float) -> list[list[tuple[int, Answer]]]:
                if rank in group.dead:
                    raise RankDied(f"engine {rank} died")
                if group.broken:
                    raise RoleFailed("no progress")
                group.answered[rank] += len(requests)
                return [[(request.key, Answer([rank], [0.0], True)) for request in requests]]

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
    assert waiting.result(timeout=10) == [0, 0, 0]


def test_an_engine_that_others_found_dead_gets_nothing(background: Background) -> None:
    engines = Engines(Group(1), 10.0)  # type: ignore[arg-type]
    background.run(engines.revived())  # as after an earlier death
    background.run(engines.lost(0))
    waiting = background.start(ask(engines, 2))
    background.run(asyncio.sleep(0.05))
    assert not waiting.done()
    background.run(engines.revived())
    assert waiting.result(timeout=10) == [0, 0]


def test_other_failures_are_told(background: Background) -> None:
    group = Group(1)
    group.broken = True
    with pytest.raises(RoleFailed, match="no progress"):
        background.run(ask(Engines(group, 10.0), 3))  # type: ignore[arg-type]
