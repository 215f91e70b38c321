"""Ends runs of deployments that Prefect's worker cannot end, because their process is gone, was never
started, or ignores a cancellation."""

from __future__ import annotations

import contextlib
import socket
from datetime import UTC, datetime

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Crashed

UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
# The record of a resumed or retried run names its last process until the worker has started the new one,
# which takes some seconds on a busy machine.
PROCESS_SECONDS = 60.0
STUCK_SECONDS = 600.0  # a worker that took a run and failed before starting its process leaves it pending
IGNORED_SECONDS = 60.0  # Prefect's runner ends a cancelled process within half a minute
END_SECONDS = 30.0  # time for a flow's process to end its stages


def sweep(client: SyncPrefectClient, at_start: bool = False) -> int:
    """Marks runs of deployments whose process on this machine is gone as crashed, or as cancelled if they
    were being cancelled.

    Ends processes that are still running `IGNORED_SECONDS` after a cancellation. The worker's runner sends
    one signal per run, which a retried run has already received.

    `at_start`: whether no worker is running yet. Runs that never had a process, and runs that were about to
    start, are then marked too. Returns the number of marked runs.
    """
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}), limit=200
    )
    for run in found:
        end_ignored(client, run)
    gone = [run for run in found if _is_without_process(run, at_start)]
    gone = [client.read_flow_run(run.id) for run in gone]  # a run may have ended since the list was read
    gone = [run for run in gone if _is_without_process(run, at_start)]
    for run in gone:
        ended = Cancelled if run.state_type == StateType.CANCELLING else Crashed
        client.set_flow_run_state(
            run.id, ended(message="its process is gone; run it again to continue"), force=True
        )
    return len(gone)


def end_ignored(client: SyncPrefectClient, run: FlowRun) -> None:
    """Ends the process of a run that was cancelled more than `IGNORED_SECONDS` ago, with SIGTERM and then
    SIGKILL. Marks the run as cancelled, because the flow's engine treats a signal that does not come from the
    worker as a crash."""
    process = _process_of(run)
    if run.state_type != StateType.CANCELLING or process is None or _age(run) < IGNORED_SECONDS:
        return
    with contextlib.suppress(psutil.Error):
        process.terminate()
        _, alive = psutil.wait_procs([process], END_SECONDS)
        for left in alive:
            left.kill()
        psutil.wait_procs(alive, END_SECONDS)
    if client.read_flow_run(run.id).state_type in (StateType.CRASHED, StateType.CANCELLING):
        client.set_flow_run_state(run.id, Cancelled(message="cancelled"), force=True)


def _is_without_process(run: FlowRun, at_start: bool) -> bool:
    if run.deployment_id is None or run.state is None or run.state.type not in UNFINISHED:
        return False
    if at_start:
        return not (run.infrastructure_pid and _may_live(run))
    age = _age(run)
    if not run.infrastructure_pid:
        return run.state.type == StateType.PENDING and age > STUCK_SECONDS
    may_start = run.state.type != StateType.CANCELLING and age < PROCESS_SECONDS
    return not may_start and not _may_live(run)


def _age(run: FlowRun) -> float:
    """Returns the seconds since the run entered its current state."""
    return (datetime.now(UTC) - run.state.timestamp).total_seconds() if run.state else 0.0


def _may_live(run: FlowRun) -> bool:
    """Returns whether a run's process is alive or may be alive, because it is on another machine or its
    environment cannot be read."""
    host, pid = _place(run)
    if host and host != socket.gethostname():
        return True
    try:
        return _is_of_run(int(pid), run)
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError):
        return False


def _process_of(run: FlowRun) -> psutil.Process | None:
    """Returns a run's process if it is certainly on this machine, otherwise None."""
    host, pid = _place(run)
    try:
        here = host in ("", socket.gethostname())
        return psutil.Process(int(pid)) if here and _is_of_run(int(pid), run) else None
    except (psutil.Error, ValueError):
        return None


def _place(run: FlowRun) -> tuple[str, str]:
    """Returns the host and PID of a run's process, which Prefect records as HOST:PID or PID."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    return host, pid


def _is_of_run(pid: int, run: FlowRun) -> bool:
    """Returns whether a process on this machine belongs to a run. Compares its environment, because a zombie
    has none and the PID may have been reused."""
    return psutil.Process(pid).environ().get("PREFECT__FLOW_RUN_ID") == str(run.id)
