"""Creates the objects that `alignflow serve` needs on a Prefect server: pool, queues, slot, automation for
silent runs, and deployments.

Manual runs have a queue with higher priority than scheduled runs, and start before them, even when many
scheduled runs are late.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import available_timezones

import psutil
from prefect import Flow
from prefect._vendor.croniter.croniter import CroniterBadDateError, croniter  # what Prefect reads cron with
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Crashed

from flows.alignment import alignment
from flows.loops import loop
from flows.parts import evaluate, publish
from flows.serve import LIMIT, POOL, SAFELY
from rlhf_core.config import KINDS, Loop, Recipe
from rlhf_core.recipe.load import load_recipe
from rlhf_core.recipe.loop_record import check_judged, loop_of
from rlhf_core.recipe.plan import plan

ASKED = "asked"
SCHEDULED = "scheduled"  # names of the queues
LONGEST = 366 * 86400.0  # seconds between two runs of a schedule
SILENT_SECONDS = 540  # three heartbeats at Prefect's default of 180 s
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
# A run that starts again (resumed or retried) has its last process recorded until the worker has started the
# new one. On a busy machine this takes some seconds.
PROCESS_SECONDS = 60.0
STUCK_SECONDS = 600.0  # a worker that took a run and failed before its process leaves it pending


class ServedRecipe(NamedTuple):
    """A recipe with deployments: the path or URI that each run reads, the overrides of its deployments, and
    the loaded recipe."""

    path: str
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the recipe's deployments."""
        return {"recipe": self.path, "overrides": list(self.overrides)}


def served(
    paths: Sequence[str], overrides: Sequence[str], ends: Mapping[str, float] = MappingProxyType({})
) -> list[ServedRecipe]:
    """Reads and plans the recipes. `ends`: `max_rounds` and `min_gain` of their loops.

    Raises ValueError for mistakes, for two recipes with the same name, and for `ends` of a recipe without a
    loop.
    """
    found = [ServedRecipe(path, tuple(overrides), load_recipe(path, overrides)) for path in paths]
    if ends.get("max_rounds", 1) < 1:
        raise ValueError(f"--max-rounds {ends['max_rounds']}: give 1 or more")
    for one in found:
        plan(one.recipe)
        if ends:
            name = loop_of(one.recipe)
            if "min_gain" in ends:
                check_judged(one.recipe, name)
    names = [one.recipe.name for one in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"two recipes are called {twice[0]}: give one of them another name")
    return found


def schedule_of(every: float | None, cron: str, timezone: str) -> Schedule:
    """Returns the schedule. Raises ValueError when Prefect would refuse it or never start a run."""
    if timezone not in available_timezones():
        raise ValueError(f"timezone {timezone!r} is unknown: give a name such as Europe/Berlin or UTC")
    if every is not None and not 1 <= every <= LONGEST:
        raise ValueError(f"an interval of {every:g} s is no schedule: give 1 to {LONGEST:.0f}, a year")
    if every is not None:
        return Schedule(interval=timedelta(seconds=every))
    try:
        schedule = Schedule(cron=cron, timezone=timezone)
    except ValueError:
        raise ValueError(
            f"cron {cron!r} is no schedule: give minute, hour, day, month and weekday, such as '0 2 * * *'"
        ) from None
    try:
        croniter(cron, datetime.now(UTC)).get_next()
    except CroniterBadDateError:
        day, month = cron.split()[2:4]
        raise ValueError(
            f"cron {cron!r} never fires: month {month} has no day {day}; correct the day or the month"
        ) from None
    return schedule


def prepare(client: SyncPrefectClient) -> None:
    """Creates or updates pool, queues, slot and automation. Ends unfinished runs of an earlier `serve` and
    frees their slots."""
    command = shlex.join([sys.executable, *SAFELY, "prefect.engine"])
    template = job_template(command=command, working_dir=str(Path.cwd()))  # for `artifacts` and overrides
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    # Scheduled runs have their own queue, which starts one at a time. A concurrency limit on their
    # deployment would cancel many late runs at once. The server's SQLite refuses most of so many writes,
    # and clients wait up to a minute before they retry.
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


def job_template(**fixed: str) -> dict[str, Any]:
    """Returns the base job template of a process pool. `fixed`: fields that runs and deployments cannot
    change, because the template has no variables.

    Runs start with the worker's environment. There is no `env` here because Prefect would merge the runs'
    `env` into it, often unchecked.
    """
    variables = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"variables": variables, "job_configuration": {"stream_output": True, **fixed}}


def watch_silent_runs(client: SyncPrefectClient) -> None:
    """Creates the automation for silent runs, or updates one from an earlier version."""
    there = client.read_automations_by_name(SILENT.name)
    if there:
        client.update_automation(there[0].id, SILENT)
    else:
        client.create_automation(SILENT)


def sweep(client: SyncPrefectClient, at_start: bool = False) -> int:
    """Marks runs of deployments whose process on this machine is gone as crashed, or as cancelled if they
    were being cancelled.

    `at_start`: no worker runs yet. Also marks runs that never had a process, and runs that were about to
    start. Returns the number of marked runs.
    """
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": UNFINISHED}}}), limit=200
    )
    gone = [run for run in found if _is_without_process(run, at_start)]
    gone = [client.read_flow_run(run.id) for run in gone]  # it may have ended since the list was read
    gone = [run for run in gone if _is_without_process(run, at_start)]
    for run in gone:
        ended = Cancelled if run.state_type == StateType.CANCELLING else Crashed
        client.set_flow_run_state(
            run.id, ended(message="its process is gone; run it again to go on"), force=True
        )
    return len(gone)


def deploy(
    api: str,
    one: ServedRecipe,
    schedule: Schedule | None,
    ends: Mapping[str, float] = MappingProxyType({}),
    feedback: bool = False,
) -> dict[str, UUID]:
    """Creates a recipe's deployments and returns their ids by name.

    `schedule`: for its loop, or for the whole recipe if it does not have exactly one loop. `ends`: more
    parameters of its loop. `feedback`: creates a deployment of its loop for runs that new feedback starts.
    """
    made = {KINDS[config.stage].makes for config in one.recipe.stages.values()}
    loops = [config for config in one.recipe.stages.values() if isinstance(config, Loop)]
    flows: list[tuple[Flow[..., Any], str]] = [(alignment, "flows.alignment.alignment")]
    flows += [(loop, "flows.loops.loop")] if len(loops) == 1 else []
    flows += [(evaluate, "flows.parts.evaluate")] if "report" in made else []
    flows += [(publish, "flows.parts.publish")] if "published" in made else []
    name = one.recipe.name
    scheduled = flows[1 if len(loops) == 1 else 0]
    wanted: list[tuple[Flow[..., Any], str, str, str, Schedule | None]] = [
        (*flow, name, ASKED, None) for flow in flows
    ]
    wanted += [(*scheduled, f"{name}-scheduled", SCHEDULED, schedule)] if schedule else []
    wanted += [(loop, "flows.loops.loop", feedback_name(name), SCHEDULED, None)] if feedback else []
    deployed = {}
    with temporary_settings({PREFECT_API_URL: api}):
        for flow, entrypoint, name, queue, when in wanted:
            parameters = {**one.parameters, **(ends if flow is loop else {})}
            deployment = flow.to_deployment(
                name, schedule=when, parameters=parameters, work_pool_name=POOL, work_queue_name=queue
            )
            # not a coroutine, because no event loop runs here
            assert isinstance(deployment, RunnerDeployment)
            deployment.entrypoint = entrypoint
            identity = deployment.apply()
            assert isinstance(identity, UUID)
            deployed[f"{flow.name}/{name}"] = identity
    return deployed


def pause_others(client: SyncPrefectClient, served: Collection[UUID]) -> list[str]:
    """Pauses the scheduled deployments of our pool that are not among `served`: those of an earlier `serve`,
    whose runs would start with its overrides. Also deletes their scheduled runs. Returns their names."""
    paused = []
    for deployment in client.read_deployments(limit=200):
        ours = deployment.work_pool_name == POOL and deployment.work_queue_name == SCHEDULED
        if ours and deployment.id not in served and deployment.schedules and not deployment.paused:
            client.pause_deployment(deployment.id)
            paused.append(deployment.name)
    return paused


def feedback_name(recipe: str) -> str:
    """Returns the name of the deployment whose runs are started by new feedback."""
    return f"{recipe}-feedback"


def _is_without_process(run: FlowRun, at_start: bool) -> bool:
    if run.deployment_id is None or run.state is None or run.state.type not in UNFINISHED:
        return False
    if at_start:
        return not (run.infrastructure_pid and _is_alive(run))
    age = (datetime.now(UTC) - run.state.timestamp).total_seconds()
    if not run.infrastructure_pid:
        return run.state.type == StateType.PENDING and age > STUCK_SECONDS
    may_start = run.state.type != StateType.CANCELLING and age < PROCESS_SECONDS
    return not may_start and not _is_alive(run)


def _is_alive(run: FlowRun) -> bool:
    """Returns whether a run's process (Prefect: HOST:PID or PID) is alive; True for a process on another
    machine.

    The environment is compared because a zombie has none, and because the PID can belong to a later
    process.
    """
    host, _, pid = (run.infrastructure_pid or "").rpartition(":")
    if host and host != socket.gethostname():
        return True
    try:
        return psutil.Process(int(pid)).environ().get("PREFECT__FLOW_RUN_ID") == str(run.id)
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError):
        return False


# Marks a run whose heartbeats stop as crashed: its process was killed with -9 and no worker watched it. A
# suspended run, which waits for a person, has no process and sends none.
SILENT = AutomationCore(
    name="alignflow: crashed runs",
    description=f"A flow run without a heartbeat for {SILENT_SECONDS} s is marked as crashed.",
    trigger=EventTrigger(
        after={"prefect.flow-run.heartbeat"},
        expect={
            f"prefect.flow-run.{event}"
            for event in ("heartbeat", "Completed", "Failed", "Cancelled", "Crashed", "Suspended")
        },
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_SECONDS),
    ),
    actions=[
        ChangeFlowRunState(
            state=StateType.CRASHED, message="no heartbeat: its process is gone; run it again to go on"
        )
    ],
)
