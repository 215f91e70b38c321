"""Supervises the processes that `alignflow serve` has started, runs whose process is gone, and inboxes with
enough rows for a round."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Never
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectException
from rich.console import Console

from flows.serving.ended_runs import sweep
from flows.serving.services import Services
from flows.serving.silent_runs import tell_suspended
from flows.triggers.inbox_watch import LOOK_SECONDS
from flows.triggers.runs import FeedbackTrigger

CHECK_SECONDS = 0.5
SWEEP_SECONDS = 15.0


class Failures:
    """The failed runs of deployments, each reported once."""

    def __init__(self, since: datetime):
        """Starts without reported runs. Runs that failed before `since` are never reported."""
        self._since = since
        self._told = set[UUID]()

    def new(self, client: SyncPrefectClient) -> list[str]:
        """Returns a line for each run that failed since the last call, with its reason."""
        wanted = {"state": {"type": {"any_": [StateType.FAILED]}}, "end_time": {"after_": self._since}}
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted), limit=200)
        lines = []
        for run in found:
            if run.deployment_id is None or run.id in self._told:
                continue
            self._told.add(run.id)
            lines.append(f"run {run.name} failed: {reason_of(run)}")
        return lines


def reason_of(run: FlowRun) -> str:
    """Returns the first line of a failed run's message, without Prefect's prefix."""
    said = (run.state.message if run.state else None) or ""
    error = said.partition("encountered an exception: ")[2] or said
    sentence = re.sub(r"^\w+: ", "", error.strip())  # the exception's class
    return sentence.partition("\n")[0] or "see its log"


def supervise(
    console: Console, client: SyncPrefectClient, services: Services, triggers: Sequence[FeedbackTrigger]
) -> Never:
    """Supervises processes, runs and inboxes until Ctrl-C. Raises MachineLacks when one of the processes
    ends."""
    faults: set[str] = set()

    @contextmanager
    def told(what: str) -> Iterator[None]:
        try:
            yield
        except (PrefectException, HTTPError) as error:  # server busy, or a run deleted meanwhile
            console.print(
                f"{what} ({type(error).__name__}); trying again soon", markup=False, highlight=False
            )
        except (ValueError, OSError, sqlite3.Error) as error:  # a recipe, a file or an inbox
            if str(error) not in faults:
                console.print(f"{what}: {error}", markup=False, highlight=False)
                faults.add(str(error))

    failed = Failures(datetime.now(UTC))
    swept = looked = time.monotonic()
    while True:
        time.sleep(CHECK_SECONDS)
        services.check()
        if time.monotonic() - looked > LOOK_SECONDS:
            for trigger in triggers:
                with told("new feedback was not checked"):
                    run = trigger.look()
                    if run:
                        console.print(f"new feedback: started run {run.name}", markup=False, highlight=False)
            looked = time.monotonic()
        if time.monotonic() - swept > SWEEP_SECONDS:
            with told("runs were not checked"):
                sweep(client)
                tell_suspended(client)
                for line in failed.new(client):
                    console.print(line, markup=False, highlight=False)
            with told("the log was not truncated"):
                services.bound_log()
            swept = time.monotonic()
