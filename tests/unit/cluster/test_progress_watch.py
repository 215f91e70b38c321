"""When a wait for ranks ends and what it says meanwhile, by a clock and reports of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import RpcError

from rlhf_core.cluster import progress_watch
from rlhf_core.cluster.progress_watch import Silent, Watch
from rlhf_core.system.machine import NodeLost


class World:
    """Time that passes in waits, ranks that report, and what the log gets. `done`: when the work of a
    reference is."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        report: Callable[[str, float], bytes],
        done: dict[str, float] | None = None,
    ):
        self.now = 0.0
        self.done = done or {}
        self.log = list[tuple[float, Any]]()
        monkeypatch.setattr(progress_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(progress_watch.ray, "wait", self.wait)
        monkeypatch.setattr(progress_watch, "get", lambda key: report(key, self.now))

    def wait(
        self, refs: Sequence[str], num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[str], list[str]]:
        self.now += timeout
        ready = [ref for ref in refs if self.done.get(ref, 1e9) <= self.now][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def watch(self, timeout: float, *refs: str) -> Watch:
        keys = {ref: ref for ref in refs}
        return Watch(
            keys,
            timeout,
            lambda silent: self.log.append((self.now, silent)),
            lambda text: self.log.append((self.now, text)),
        )


def steps(key: str, now: float) -> bytes:
    return f"{now // 5:.0f}/0/0".encode()


def test_work_that_goes_on_is_waited_for_and_shown_after_one_two_and_four_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, steps, {"a": 400.0})
    assert world.watch(20, "a").next(["a"]) == ("a", [])
    assert [round(when / 60) for when, _ in world.log] == [1, 2, 4]
    assert world.log[0][1] == "12 parts of work in 60 s", "those since the first look"


def test_a_rank_without_progress_is_noticed_and_then_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda key, now: steps(key, now if key == "a" else min(now, 50.0)))
    with pytest.raises(Silent) as silent:
        world.watch(100, "a", "b").next(["a", "b"])
    assert silent.value.refs == ["b"] and 150 <= world.now <= 170
    assert [told for _, told in world.log if not isinstance(told, str)] == [["b"]], "once"


def test_what_fails_beside_the_work_ends_the_wait_and_is_never_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, steps, {"a": 400.0, "stage": 300.0})
    assert world.watch(20, "a").next(["a"], ["stage"]) == ("stage", ["a"]) and 300 <= world.now < 310
    assert not [told for _, told in world.log if not isinstance(told, str)]
    world.done["stage"] = 1e9
    world.now = 0.0
    assert world.watch(20, "a").next(["a"], ["stage"]) == ("a", [])


def test_a_store_that_cannot_be_read_makes_no_rank_silent_until_the_timeout_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = 130.0

    def report(key: str, now: float) -> bytes:
        if 40 < now < ends:
            raise RpcError("the head is busy")
        return steps(key, now)

    world = World(monkeypatch, report, {"a": 400.0})
    assert world.watch(100, "a").next(["a"]) == ("a", [])
    ends = 1e9
    world.now = 0.0
    with pytest.raises(NodeLost, match=r"^the key-value store of the Ray cluster gave no answer for 100 s"):
        world.watch(100, "a").next(["a"])
    assert world.now < 160


def test_a_lost_node_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, steps)

    def require() -> None:
        if world.now > 30:
            raise NodeLost("the Ray node 10.0.0.2 gave no answer")

    monkeypatch.setattr(progress_watch.reach, "require", require)
    with pytest.raises(NodeLost):
        world.watch(3600, "a").next(["a"])
    assert world.now < 40


def test_a_folder_that_is_removed_while_it_is_looked_at_does_not_end_the_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([FileNotFoundError("state/.step-2"), "1/0/0", "2/0/0"])
    told = list[str]()
    ended = KeyError("the end")

    def seen() -> str:
        if isinstance(look := next(looks, ended), Exception):
            raise look
        return look

    monkeypatch.setattr(progress_watch.progress, "seen", seen)
    monkeypatch.setattr(progress_watch, "put", lambda key, text: told.append(text))
    monkeypatch.setattr(progress_watch.time, "sleep", lambda seconds: None)
    with pytest.raises(KeyError, match="the end"):
        progress_watch._report("rank")
    assert told == ["1/0/0", "2/0/0"]
