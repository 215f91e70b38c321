"""Checks which ranks make progress: each rank reports its own progress (see `rlhf_core.system.progress`), and
the waiting process reads the reports.

A busy rank cannot answer a call, so a thread in its process writes the report to the cluster's key-value
store. Ray's concurrency groups would answer calls during the work, but they move the work off the main
thread, where libraries set their signal handlers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import ray
from ray.exceptions import RpcError

from rlhf_core.cluster.ray_internals import get, put
from rlhf_core.cluster.reach import CHECK_SECONDS, lost, reach
from rlhf_core.system import progress
from rlhf_core.system.machine import NodeLost

REPORT_SECONDS = 0.5
LOOKS = 10  # checks within the time that a rank may be silent
LONGEST_PAUSE = 15.0  # seconds between two checks
SHOWN_SECONDS = 60.0  # of waiting before the log first reports what has been done
NOTICE_SECONDS = 30.0  # without progress before the log reports it


def report(key: str) -> None:
    """Starts reporting the progress of this process and its children to the cluster's store, under `key`."""
    progress.count_children()
    Thread(target=_report, args=(key,), name="progress", daemon=True).start()


def _report(key: str) -> None:
    reported = ""
    while True:
        # a folder may be removed while it is inspected, for example; the next round tries again
        with suppress(RpcError, OSError):
            now = progress.seen()
            if now != reported:
                put(key, now)
                reported = now
        time.sleep(REPORT_SECONDS)


class Silent(Exception):
    """Raised when ranks have made no progress for too long. `refs`: the references to their work."""

    def __init__(self, refs: Sequence[Any]):
        super().__init__(refs)
        self.refs = refs


class Watch:
    """Waits for the work of several ranks, none of which may go without progress for `timeout` seconds.

    `keys`: maps the reference to each rank's work to the key under which the rank reports; ranks that share a
    key count as silent only when none of them makes progress. `notice` is called once, with the references of
    ranks that have made no progress for NOTICE_SECONDS. `show` is called with a description of the work done
    so far, first after SHOWN_SECONDS and then at doubling intervals.
    """

    def __init__(
        self,
        keys: Mapping[Any, str],
        timeout: float,
        notice: Callable[[Sequence[Any]], None],
        show: Callable[[str], None],
    ):
        self._keys = keys
        self._timeout = timeout
        self._notice = notice
        self._show = show
        self._first: dict[str, bytes | None] = {}  # each rank's report at the first check
        self._noticed: set[Any] = set()
        # each rank's report at the last check; other processes may watch the same ranks
        self._last: dict[str, bytes | None] = {}
        self._pause = min(timeout / LOOKS, LONGEST_PAUSE)
        now = time.monotonic()
        self._since = dict.fromkeys(keys, now)
        self._next_look = now + self._pause
        self._begun = now
        self._shown = now
        self._unread: float | None = None  # when reports became unreadable

    def next(self, waiting: Sequence[Any], failing: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """Returns the first reference that is ready, and the remaining references of `waiting`. `failing`:
        references that become ready only if a process on which `waiting` depends fails; they report no
        progress. Raises Silent when a process makes no progress, and NodeLost when a node is lost."""
        while True:
            pause = min(CHECK_SECONDS, max(0.0, self._next_look - time.monotonic()))
            ready, others = ray.wait([*waiting, *failing], num_returns=1, timeout=pause, fetch_local=False)
            others = [ref for ref in others if ref not in failing]
            reach.require()
            if time.monotonic() >= self._next_look:
                self._look(others)
            if ready:
                return ready[0], others

    def _look(self, others: list[Any]) -> None:
        _, working = (
            ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False) if others else ([], [])
        )
        now = time.monotonic()
        self._next_look = now + self._pause
        try:
            reports = {key: get(key) for key in {self._keys[ref] for ref in working}}
        except RpcError:  # the head is gone or unreachable, which `reach` detects, or it is slow
            self._unread = self._unread or now
            if now - self._unread >= self._timeout:
                raise NodeLost(
                    lost("the key-value store of the Ray cluster", f"for {self._timeout:.0f} s")
                ) from None
            return
        self._unread = None
        first = {key: report for key, report in reports.items() if key not in self._last}
        self._last |= first
        self._since |= {
            ref: now for ref in working if reports[self._keys[ref]] != self._last[self._keys[ref]]
        }
        self._last.update(reports)
        self._first |= first
        if now - self._shown >= max(SHOWN_SECONDS, self._shown - self._begun):
            pairs = [
                ((self._first[key] or b"").decode(), (last or b"").decode())
                for key, last in self._last.items()
            ]
            self._show(f"{progress.between(pairs)} in {now - self._begun:.0f} s")
            self._shown = now
        silent = [ref for ref in working if now - self._since[ref] >= self._timeout]
        if silent:
            raise Silent(silent)
        self._noticed = {ref for ref in self._noticed if now - self._since[ref] >= NOTICE_SECONDS}
        fresh = [
            ref for ref in working if now - self._since[ref] >= NOTICE_SECONDS and ref not in self._noticed
        ]
        if fresh:
            self._notice(fresh)
            self._noticed |= {*fresh}
