"""Looks after what `alignflow serve` has started: its processes, runs whose process is gone, and inboxes with rows for a round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Never

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import PrefectException
from rich.console import Console

from flows.deployments import sweep
from flows.serve import Services
from flows.triggers.feedback import LOOK_SECONDS
from flows.triggers.runs import FeedbackTrigger

CHECK_SECONDS, SWEEP_SECONDS = 0.5, 15.0


def supervise(console: Console, client: SyncPrefectClient, services: Services, triggers: Sequence[FeedbackTrigger]) -> Never:
    """Does so until Ctrl-C. Raises MachineLacks when one of the processes ends."""
    faults: set[str] = set()

    @contextmanager
    def told(what: str) -> Iterator[None]:
        try:
            yield
        except (PrefectException, HTTPError) as error:  # the server was busy, or a run was deleted meanwhile
            console.print(f"{what} ({type(error).__name__}), again soon", markup=False, highlight=False)
        except ValueError as error:
            if str(error) not in faults:
                console.print(f"{what}: {error}", markup=False, highlight=False)
                faults.add(str(error))

    swept = looked = time.monotonic()
    while True:
        time.sleep(CHECK_SECONDS)
        services.check()
        if time.monotonic() - looked > LOOK_SECONDS:
            for trigger in triggers:
                with told("new feedback was not looked for"):
                    if run := trigger.look():
                        console.print(f"new feedback: run {run.name} is started", markup=False, highlight=False)
            looked = time.monotonic()
        if time.monotonic() - swept > SWEEP_SECONDS:
            with told("runs were not checked"):
                sweep(client)
            services.bound_log()
            swept = time.monotonic()
