"""The machine's slot: stages of one run share it, it is freed after the last of them, and a wait for it ends
with the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tasks.slots
from rlhf_core.runs.allotment import Allotment, Stopped, allotment
from tasks.slots import LIMIT_ENV, SharedSlot, machine
from tests.support.micro import wait_until


class Limit:
    """A limit with one slot, in place of the server's."""

    def __init__(self) -> None:
        self.free = threading.Semaphore(1)
        self.taken = 0
        self.freed = 0
        self.broken = False

    @contextmanager
    def concurrency(self, name: str, **_: Any) -> Iterator[None]:
        if self.broken:
            raise ValueError(f"there is no limit {name}")
        self.free.acquire()
        self.taken += 1
        try:
            yield
        finally:
            self.freed += 1
            self.free.release()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    found = Limit()
    monkeypatch.setattr(tasks.slots, "concurrency", found.concurrency)
    monkeypatch.setattr(tasks.slots, "_shared", SharedSlot())
    monkeypatch.setenv(LIMIT_ENV, "machine")
    return found


def test_stages_of_a_run_share_the_slot(limit: Limit) -> None:
    with machine():
        with machine():
            assert (limit.taken, limit.freed) == (1, 0)
        assert (limit.taken, limit.freed) == (1, 0)
    assert (limit.taken, limit.freed) == (1, 1)
    with machine():
        assert limit.taken == 2


def test_a_stage_waits_for_another_run_and_leaves_when_its_own_ends(limit: Limit) -> None:
    limit.free.acquire()  # another run has it
    given = Allotment()
    errors = list[BaseException]()

    def stage() -> None:
        allotment.set(given)  # of this thread alone
        try:
            with machine():
                pytest.fail("it had no slot")
        except BaseException as error:
            errors.append(error)

    both = [threading.Thread(target=stage) for _ in range(2)]
    for thread in both:
        thread.start()
    wait_until(
        lambda: any(thread.name.startswith("slot of") for thread in threading.enumerate()), "one to ask"
    )
    given.stop.set()
    for thread in both:
        thread.join(60)
    assert [type(error) for error in errors] == [Stopped, Stopped]
    limit.free.release()
    wait_until(lambda: limit.taken == limit.freed, "a slot that came late to be given back")
    with machine():
        assert limit.taken - limit.freed == 1


def test_a_limit_that_there_is_not_is_an_error_each_time(limit: Limit) -> None:
    limit.broken = True
    for _ in range(2):
        with pytest.raises(ValueError, match="there is no limit machine"), machine():
            pass
    limit.broken = False
    with machine():
        assert limit.taken == 1


def test_without_a_limit_nothing_is_asked(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_ENV)
    with machine():
        assert limit.taken == 0
