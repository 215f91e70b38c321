"""Creates the objects that `alignflow serve` needs on a Prefect server: pool, queues, slot and deployments.

Manual runs have a queue of higher priority, so they start before scheduled runs even when many scheduled runs
are late.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.alignment import alignment
from flows.loops import loop
from flows.parts import evaluate, publish
from flows.serving.ended_runs import sweep
from flows.serving.services import LIMIT, POOL, SAFELY
from flows.serving.silent_runs import watch_silent_runs
from rlhf_core.config import KINDS, Recipe
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.loops.loop_choice import check_judged, loop_of
from rlhf_core.recipe.plan import plan

ASKED = "asked"
SCHEDULED = "scheduled"  # names of the queues


class ServedRecipe(NamedTuple):
    """A recipe with deployments: the path or URI that each run reads, its deployments' overrides, and the
    loaded recipe."""

    path: str
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of the recipe's deployments."""
        return {"recipe": self.path, "overrides": list(self.overrides)}


def served(
    paths: Sequence[str], overrides: Sequence[str], ends: Mapping[str, float] = MappingProxyType({})
) -> list[ServedRecipe]:
    """Reads and plans the recipes. `ends`: the `max_rounds` and `min_gain` of their loops.

    Raises ValueError if a recipe has mistakes, if two recipes have the same name, or if `ends` are given for
    a recipe without a loop.
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


def prepare(client: SyncPrefectClient) -> None:
    """Creates or updates pool, queues, slot and automation. Ends unfinished runs of an earlier `serve` and
    frees their slots."""
    command = shlex.join([sys.executable, *SAFELY, "prefect.engine"])
    template = job_template(command=command, working_dir=str(Path.cwd()))  # for `artifacts` and overrides
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    except ObjectAlreadyExists:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    # Scheduled runs have their own queue, which starts one at a time. A concurrency limit on their deployment
    # would cancel many late runs at once; the server's SQLite refuses most of so many writes, and clients
    # wait up to a minute before they retry.
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
    """Returns the base job template of a process pool. `fixed`: values of fields that runs and deployments
    cannot change, because the template has no variables for them.

    Runs start with the worker's environment. There is no `env` here because Prefect would merge the runs'
    `env` into it, often unchecked.
    """
    variables = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"variables": variables, "job_configuration": {"stream_output": True, **fixed}}


def deploy(
    api: str,
    one: ServedRecipe,
    schedule: Schedule | None,
    ends: Mapping[str, float] = MappingProxyType({}),
    feedback: bool = False,
) -> dict[str, UUID]:
    """Creates a recipe's deployments and returns their ids by name.

    `schedule`: applies to its loop, or to the whole recipe if it does not have exactly one loop. `ends`: more
    parameters of its loop. `feedback`: whether to create a deployment of its loop that new feedback starts.
    """
    kinds = [KINDS[config.stage] for config in one.recipe.stages.values()]
    made = {kind.makes for kind in kinds}
    loops = [kind for kind in kinds if kind.is_loop]
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
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        for flow, entrypoint, name, queue, when in wanted:
            if when is not None:
                when = in_step(client, f"{flow.name}/{name}", when)
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


def in_step(client: SyncPrefectClient, name: str, schedule: Schedule) -> Schedule:
    """Returns an interval schedule that continues the deployment's existing schedule if the interval is the
    same, because an interval that began again at each start of `serve` might never end. Returns other
    schedules unchanged. `name`: FLOW/NAME."""
    if schedule.interval is None:
        return schedule
    try:
        known = client.read_deployment_by_name(name).schedules
    except ObjectNotFound:
        return schedule
    for each in known:
        if isinstance(each.schedule, IntervalSchedule) and each.schedule.interval == schedule.interval:
            return dataclasses.replace(schedule, anchor_date=each.schedule.anchor_date)
    return schedule


def pause_others(client: SyncPrefectClient, served: Collection[UUID]) -> list[str]:
    """Pauses the scheduled deployments of our pool that are not among `served`, and deletes their scheduled
    runs. These deployments belong to an earlier `serve`, and their runs would start with its overrides.
    Returns their names."""
    paused = []
    for deployment in client.read_deployments(limit=200):
        ours = deployment.work_pool_name == POOL and deployment.work_queue_name == SCHEDULED
        if ours and deployment.id not in served and deployment.schedules and not deployment.paused:
            client.pause_deployment(deployment.id)
            paused.append(deployment.name)
    return paused


def feedback_name(recipe: str) -> str:
    """Returns the name of the deployment that new feedback starts."""
    return f"{recipe}-feedback"
