"""Threads of a worker: its part of the cores of its node, of a container's quota, or of its stage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_core.cluster import worker
from rlhf_core.cluster.worker import cpu_threads
from rlhf_core.runs.allotment import CORES_ENV
from rlhf_core.system import machine


def test_the_cores_of_a_node_are_divided_by_the_processes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES_ENV, raising=False)
    monkeypatch.setattr(worker, "num_cpus", lambda: 64)
    assert [cpu_threads(side_by_side) for side_by_side in (1, 2, 16, 100)] == [64, 32, 4, 1]
    monkeypatch.setenv(CORES_ENV, "12")
    assert cpu_threads(4) == 3, "of a stage beside others, its cores"


@pytest.mark.parametrize(
    ("quota", "expected"), [("1600000 100000", 16), ("150000 100000", 2), ("max 100000", 96), ("", 96)]
)
def test_a_containers_quota_counts(quota: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CORES_ENV, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setattr(
        machine.Path, "read_text", lambda path: quota if path == Path("/sys/fs/cgroup/cpu.max") else None
    )
    assert machine.num_cpus() == expected == cpu_threads(1)
