"""Starts the ranks of a role on a Ray cluster for one job of a stage, and ends them when the job is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.ray_cluster import connect, is_ours, leave, reserve
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config.process_groups import Wanted

ENDING_SECONDS = 30.0


@contextmanager
def temporary_group(
    name: str,
    wanted: Wanted,
    timeout: float,
    factory: Callable[..., Any],
    prepare: tuple[Any, ...] = (),
    span: int = 1,
    pipeline_stages: int = 1,
    **options: Any,
) -> Iterator[WorkerGroup]:
    """Starts the processes of `wanted` and creates the role's object on each rank (`WorkerGroup.prepare`,
    `WorkerGroup.build`). `span` and `pipeline_stages`: see `WorkerGroup`.

    Raises ValueError and TimeoutError for the same reasons as `reserve`. Leaves the cluster at the end; if
    `connect` started it, first waits until the processes have ended, because another stage needs their GPUs.
    """
    connect()
    ours = is_ours()
    try:
        group = WorkerGroup(
            name, reserve(arrange({name: wanted}), timeout), 1, span, pipeline_stages=pipeline_stages
        )
        if prepare:
            group.prepare(*prepare)
        group.build(factory, **options).wait(timeout)
        yield group
    finally:
        working = _working() if ours else []
        leave()
        psutil.wait_procs(working, ENDING_SECONDS)


def _working() -> list[psutil.Process]:
    """Returns the rank processes of this process's own cluster, and their descendants."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):  # one of them has ended meanwhile
        for raylet in [child for child in psutil.Process().children() if child.name() == "raylet"]:
            found += raylet.children(recursive=True)
    return found
