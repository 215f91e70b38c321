"""Processes on a Ray cluster for one job of a stage that otherwise works in its own: gone when the job is done, with what they held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.ray_cluster import connect, is_ours, leave, reserve
from rlhf_core.cluster.worker_group import Group, cpu_threads
from rlhf_core.config.processes import Wanted, processes

ENDING_SECONDS = 30.0


class TemporaryGroup(NamedTuple):
    """A group, and the processes that are to be waited for at the end: the caller adds them when they are up."""

    group: Group
    pids: list[int]


@contextmanager
def temporary_group(name: str, wanted: Wanted, span: int, timeout: float) -> Iterator[TemporaryGroup]:
    """A group of the processes of `wanted`, `span` to a rank. ValueError and TimeoutError as `reserve`; the cluster is left at
    the end, and processes of one of our own have ended then: another stage needs their GPUs."""
    connect()
    ours, pids = is_ours(), list[int]()
    try:
        yield TemporaryGroup(Group(name, reserve(arrange({name: wanted}), timeout), cpu_threads(processes(wanted)), span), pids)
    finally:
        leave()
        deadline = time.monotonic() + ENDING_SECONDS
        while ours and any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
