"""Marks runs whose heartbeats stop as crashed, with an automation on the Prefect server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import Event, Resource

SILENT_SECONDS = 540  # three heartbeats at Prefect's default of 180 s
PAGE = 200  # runs in one answer
WAITS = "alignflow.flow-run.waits"

# A run whose heartbeats stop was killed with SIGKILL while no worker watched it. A suspended run, which waits
# for a person, has no process and sends no heartbeats; if one arrives after its suspension, `tell_suspended`
# keeps the automation from firing.
SILENT = AutomationCore(
    name="alignflow: crashed runs",
    description=f"A flow run without a heartbeat for {SILENT_SECONDS} s is marked as crashed.",
    trigger=EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={
            f"prefect.flow-run.{event}"
            for event in ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed", "Suspended")
        }
        | {WAITS},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_SECONDS),
    ),
    actions=[
        ChangeFlowRunState(
            state=StateType.CRASHED, message="no heartbeat: its process is gone; run it again to continue"
        )
    ],
)


def watch_silent_runs(client: SyncPrefectClient) -> None:
    """Creates the automation for silent runs, or updates one from an earlier version."""
    there = client.read_automations_by_name(SILENT.name)
    if there:
        client.update_automation(there[0].id, SILENT)
    else:
        client.create_automation(SILENT)


def tell_suspended(client: SyncPrefectClient) -> int:
    """Sends the event WAITS for each run that was suspended less than twice `SILENT_SECONDS` ago, because the
    automation might consider it silent. Returns the number of these runs."""
    recent = datetime.now(UTC) - 2 * timedelta(seconds=SILENT_SECONDS)
    wanted = {"state": {"type": {"any_": [StateType.PAUSED]}}}
    found: list[FlowRun] = []
    while page := client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(wanted), limit=PAGE, offset=len(found)
    ):
        found += page
    events = [
        Event(event=WAITS, resource=Resource({"prefect.resource.id": f"prefect.flow-run.{run.id}"}))
        for run in found
        if run.state is not None and run.state.timestamp > recent
    ]
    if events:
        client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
    return len(events)
