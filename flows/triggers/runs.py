"""Starts a run of a deployment unless one exists already, so that many requests lead to a single run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Scheduled

from flows.triggers.inbox_watch import InboxWatch

HERE = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]
SOON = timedelta(seconds=60)  # a run that is scheduled for later does not count as existing
MOST_DEPLOYMENTS = 200


class TriggerOutcome(NamedTuple):
    """The outcome of a request: the run, and whether the request started it. `run` is None if too many were
    started in the last hour."""

    run: FlowRun | None
    new: bool


def ask(client: SyncPrefectClient, name: str, tag: str, an_hour: int | None = None) -> TriggerOutcome:
    """Starts a run of the deployment FLOW/NAME with the deployment's own parameters, unless this or another
    deployment of the same flow and recipe has a run that is in progress, waiting or due.

    `tag` marks the origin of the run; at most `an_hour` runs with the same tag are started per hour. Only one
    caller per deployment may call this at a time. Raises ObjectNotFound when there is no such deployment.
    """
    own, alike = _deployments(client, name)
    now = datetime.now(UTC)
    here = _runs(
        client, alike, {"state": {"type": {"any_": HERE}}, "expected_start_time": {"before_": now + SOON}}, 1
    )
    if here:
        return TriggerOutcome(here[0], False)
    if an_hour is not None:
        recent = {"tags": {"all_": [tag]}, "expected_start_time": {"after_": now - timedelta(hours=1)}}
        if len(_runs(client, [own.id], recent, an_hour)) >= an_hour:
            return TriggerOutcome(None, False)
    once = str(uuid4())  # the client repeats requests that the server was too busy to answer
    state: State[Any] = Scheduled(scheduled_time=now)
    return TriggerOutcome(
        client.create_flow_run_from_deployment(own.id, state=state, tags=[tag], idempotency_key=once), True
    )


def _deployments(client: SyncPrefectClient, name: str) -> tuple[DeploymentResponse, list[UUID]]:
    """Returns a deployment and the ids of all deployments of its flow and recipe."""
    flow, _, title = name.partition("/")
    wanted = FlowFilter.model_validate({"name": {"any_": [flow]}})
    ours = client.read_deployments(
        flow_filter=wanted, deployment_filter=DeploymentFilter.model_validate({"name": {"any_": [title]}})
    )
    if not ours:
        raise ObjectNotFound(http_exc=LookupError(name), help_message=f"there is no deployment {name}")
    recipe = ours[0].parameters.get("recipe")
    all_ = client.read_deployments(flow_filter=wanted, limit=MOST_DEPLOYMENTS)
    return ours[0], [
        ours[0].id,
        *(other.id for other in all_ if other.id != ours[0].id and other.parameters.get("recipe") == recipe),
    ]


def _runs(
    client: SyncPrefectClient, deployments: list[UUID], more: dict[str, object], limit: int
) -> list[FlowRun]:
    wanted = FlowRunFilter.model_validate({"deployment_id": {"any_": deployments}, **more})
    return client.read_flow_runs(
        flow_run_filter=wanted, limit=limit, sort=FlowRunSort.EXPECTED_START_TIME_ASC
    )


class FeedbackTrigger:
    """Starts a run of a loop's deployment when its inbox has enough rows for a round."""

    def __init__(self, client: SyncPrefectClient, name: str, watch: InboxWatch):
        self._client = client
        self._name = name
        self._watch = watch
        self._run: UUID | None = None

    def look(self) -> FlowRun | None:
        """Starts a run if one is due and none is in progress. Returns the run, or None if none was started.
        Raises ValueError for the same reasons as `InboxWatch.due`, and errors of Prefect and httpx."""
        if self._run is not None:
            last = self._last_run(self._run)
            if last is not None and last.state is not None and not last.state.is_final():
                return None
            self._run = None
            if last is None or last.state_type == StateType.CRASHED:
                self._watch.again()
        if not self._watch.due():
            return None
        asked = ask(self._client, self._name, "feedback")
        if not asked.new or asked.run is None:
            return None
        self._watch.started()
        self._run = asked.run.id
        return asked.run

    def _last_run(self, run: UUID) -> FlowRun | None:
        """Returns the run that was started last; None when it was deleted."""
        try:
            return self._client.read_flow_run(run)
        except ObjectNotFound:
            return None
