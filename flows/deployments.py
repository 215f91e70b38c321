"""What `alignflow serve` makes on a Prefect server: pool, queues, slot, the automation for silent runs, and deployments of recipes.

Runs that somebody asks for go before scheduled ones, however many of those are late: they are in a queue of a higher priority.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import available_timezones

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Crashed
from prefect.workers.process import ProcessWorker

from flows.alignment import alignment
from flows.loops import loop
from flows.parts import evaluate, publish
from flows.serve import LIMIT, POOL
from rlhf_core.config import Loop, Recipe
from rlhf_core.loops import check_judged, loop_of
from rlhf_core.plan import plan
from rlhf_core.recipe import load_recipe

ASKED, SCHEDULED = "asked", "scheduled"  # queues
LONGEST = 366 * 86400.0  # seconds between two runs of a schedule
SILENT_SECONDS = 540  # three heartbeats of runs that were given no other frequency: Prefect's is 180 s
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


class Served(NamedTuple):
    """A recipe that is served: its file, as runs read it anew, and the overrides of its deployments."""

    path: str
    overrides: tuple[str, ...]
    recipe: Recipe


def served(paths: Sequence[str], overrides: Sequence[str], ends: Mapping[str, float] = MappingProxyType({})) -> list[Served]:
    """Reads and plans the recipes. ValueError for mistakes, for two recipes of one name, and for what is to end loops (`max_rounds`,
    `min_gain`) where a recipe has no loop to end."""
    found = [Served(path, tuple(overrides), load_recipe(path, overrides)) for path in paths]
    if ends.get("max_rounds", 1) < 1:
        raise ValueError(f"--max-rounds {ends['max_rounds']}: give 1 or more")
    for one in found:
        plan(one.recipe)
        if ends:
            name = loop_of(one.recipe)
            if "min_gain" in ends:
                check_judged(one.recipe, name)
    names = [one.recipe.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two recipes are called {twice[0]}: give one of them another name")
    return found


def schedule_of(every: float | None, cron: str, timezone: str) -> Schedule:
    """ValueError for a schedule that Prefect would refuse or never fire."""
    if timezone not in available_timezones():
        raise ValueError(f"timezone {timezone!r} is unknown: give a name such as Europe/Berlin or UTC")
    if every is not None and not 1 <= every <= LONGEST:
        raise ValueError(f"an interval of {every:g} s is no schedule: give 1 to {LONGEST:.0f}, a year")
    try:
        return Schedule(interval=timedelta(seconds=every)) if every is not None else Schedule(cron=cron, timezone=timezone)
    except ValueError:
        raise ValueError(f"cron {cron!r} is no schedule: give minute, hour, day, month and weekday, such as '0 2 * * *'") from None


def prepare(client: SyncPrefectClient) -> None:
    """Pool, queues, slot and automation; runs and slots of an earlier `serve` are ended and given back. May be repeated."""
    template = ProcessWorker.get_default_base_job_template()
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        pass
    # Scheduled runs go one by one, in a queue of their own. A concurrency limit of their deployment would cancel a burst of late ones at
    # once: of so many writers the server's SQLite refuses most, and clients wait up to a minute before they ask again.
    for priority, (name, limit) in enumerate(((ASKED, None), (SCHEDULED, 1)), start=1):
        try:
            queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
        except ObjectNotFound:
            queue = client.create_work_queue(name, work_pool_name=POOL)
        client.update_work_queue(queue.id, priority=priority, concurrency_limit=limit)
    client.upsert_global_concurrency_limit_by_name(LIMIT, 1)
    sweep(client, at_start=True)
    for slot in client.read_global_concurrency_limits(limit=200, offset=0):
        client.update_global_concurrency_limit(slot.name, GlobalConcurrencyLimitUpdate(active_slots=0))
    watch_silent_runs(client)


def watch_silent_runs(client: SyncPrefectClient) -> None:
    """Makes the automation, or brings that of an earlier version up to date."""
    if there := client.read_automations_by_name(SILENT.name):
        client.update_automation(there[0].id, SILENT)
    else:
        client.create_automation(SILENT)


def sweep(client: SyncPrefectClient, at_start: bool = False) -> int:
    """Marks runs of deployments whose process on this machine is gone as crashed, or as cancelled when they were being cancelled; at the
    start of `serve` also those that never had one. How many."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}), limit=200)
    ours = [run for run in found if run.deployment_id and (run.infrastructure_pid or at_start)]
    gone = [run for run in ours if not (run.infrastructure_pid and _process_lives(run))]
    gone = [client.read_flow_run(run.id) for run in gone]  # again: it may have said its end, and gone, after the list was read
    gone = [run for run in gone if run.state_type in UNFINISHED]
    for run in gone:
        ended = Cancelled if run.state_type == StateType.CANCELLING else Crashed
        client.set_flow_run_state(run.id, ended(message="its process is gone; run it again to go on"), force=True)
    return len(gone)


def deploy(api: str, one: Served, schedule: Schedule | None, ends: Mapping[str, float] = MappingProxyType({})) -> list[str]:
    """Makes a recipe's deployments; their names. `schedule`: of its loop, or of the whole recipe when it has none. `ends`: parameters of
    its loop."""
    kinds = {config.stage for config in one.recipe.stages.values()}
    loops = [config for config in one.recipe.stages.values() if isinstance(config, Loop)]
    flows: list[tuple[Flow[..., Any], str]] = [(alignment, "flows.alignment.alignment")]
    flows += [(loop, "flows.loops.loop")] if len(loops) == 1 else []
    flows += [(evaluate, "flows.parts.evaluate")] if kinds & {"evaluation", "alignment_tax"} else []
    flows += [(publish, "flows.parts.publish")] if "publication" in kinds else []
    with temporary_settings({PREFECT_API_URL: api}):
        names = [_apply(flow, entrypoint, one, one.recipe.name, ASKED, None, ends if flow is loop else {}) for flow, entrypoint in flows]
        if schedule is not None:
            flow, entrypoint = flows[1] if len(loops) == 1 else flows[0]
            names.append(_apply(flow, entrypoint, one, f"{one.recipe.name}-scheduled", SCHEDULED, schedule, ends if flow is loop else {}))
    return names


def _apply(
    flow: Flow[..., Any], entrypoint: str, one: Served, name: str, queue: str, schedule: Schedule | None, ends: Mapping[str, float]
) -> str:
    deployment = flow.to_deployment(
        name,
        schedule=schedule,
        parameters={"recipe": one.path, "overrides": list(one.overrides), **ends},
        work_pool_name=POOL,
        work_queue_name=queue,
        job_variables={"working_dir": str(Path.cwd())},  # paths in a recipe are relative to it
    )
    assert isinstance(deployment, RunnerDeployment)  # not a coroutine: this is called outside of any event loop
    deployment.entrypoint = entrypoint
    identity = deployment.apply()
    assert isinstance(identity, UUID)
    return f"{flow.name}/{name}"


def _process_lives(run: FlowRun) -> bool:
    """Whether a run's process, which Prefect calls HOST:PID or PID, lives; True for one of another machine. A zombie does not live, and
    another process that has got its number is not the run's."""
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if host and host != socket.gethostname():
        return True
    try:
        return f"PREFECT__FLOW_RUN_ID={run.id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return True
    except OSError:
        return sys.platform != "linux"


def _events() -> Iterator[str]:
    yield "prefect.flow-run.heartbeat"
    yield from (f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed"))


# A run that was heard of and then is silent is marked as crashed: its process was killed with -9 where no worker watched it.
SILENT = AutomationCore(
    name="alignflow: crashed runs",
    description=f"A flow run without a heartbeat for {SILENT_SECONDS} s is marked as crashed.",
    trigger=EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect=set(_events()),
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_SECONDS),
    ),
    actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process is gone; run it again to go on")],
)
