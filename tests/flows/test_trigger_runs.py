"""Which runs are started, and which are found, on a real server without a worker: the test says in which
state a run is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound

from flows.triggers.inbox_watch import InboxWatch
from flows.triggers.runs import FeedbackTrigger, TriggerOutcome
from flows.triggers.runs import ask as ask_for_run
from rlhf_core.config import Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from tests.support.micro import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Team:
    """A flow of this test's own on the server, with deployments of one recipe and of another."""

    def __init__(self, api: str, client: SyncPrefectClient):
        self.api = api
        self.client = client
        self.flow = f"flow-{uuid4().hex[:8]}"
        identity = ask(api, "/flows/", {"name": self.flow})["id"]
        names = {"own": "a.yaml", "own-scheduled": "a.yaml", "other": "b.yaml"}
        self.deployments = {
            name: ask(
                api, "/deployments/", {"name": name, "flow_id": identity, "parameters": {"recipe": recipe}}
            )["id"]
            for name, recipe in names.items()
        }

    def asked(self, an_hour: int | None = None) -> TriggerOutcome:
        return ask_for_run(self.client, f"{self.flow}/own", "webhook", an_hour)

    def schedule(self, deployment: str, after: timedelta) -> str:
        state = {
            "type": "SCHEDULED",
            "state_details": {"scheduled_time": (datetime.now(UTC) + after).isoformat()},
        }
        return str(
            ask(self.api, f"/deployments/{self.deployments[deployment]}/create_flow_run", {"state": state})[
                "id"
            ]
        )

    def say(self, run: UUID | str, state: str) -> None:
        ask(self.api, f"/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})


@pytest.fixture
def team(prefect: str) -> Iterator[Team]:
    with SyncPrefectClient(api=prefect) as client:
        made = Team(prefect, client)
        yield made
        for deployment in made.deployments.values():  # other tests use the same server
            client.delete_deployment(UUID(deployment))


def test_a_run_that_is_there_is_found(team: Team) -> None:
    first = team.asked()
    assert first.new and first.run is not None
    found = ask(team.api, f"/flow_runs/{first.run.id}")
    assert found["parameters"] == {"recipe": "a.yaml"} and found["tags"] == ["webhook"]
    for state in ("PENDING", "RUNNING", "PAUSED", "CANCELLING"):
        team.say(first.run.id, state)
        again = team.asked()
        assert again.run is not None and (again.new, again.run.id) == (False, first.run.id), state
    for state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
        team.say(first.run.id, state)
        more = team.asked()
        assert more.new and more.run is not None, state
        team.say(more.run.id, "COMPLETED")


def test_runs_of_the_same_flow_and_recipe_count_and_others_do_not(team: Team) -> None:
    team.schedule("other", timedelta(0))
    team.schedule("own-scheduled", timedelta(hours=5))
    first = team.asked()
    assert first.new and first.run is not None, "a run of another recipe, and tonight's run, are no reason"
    team.say(first.run.id, "COMPLETED")
    late = team.schedule("own-scheduled", timedelta(hours=-2))
    again = team.asked()
    assert again.run is not None and (again.new, str(again.run.id)) == (False, late)


def test_only_runs_that_requests_started_count_against_the_hour(team: Team) -> None:
    for _ in range(3):
        team.say(team.schedule("own", timedelta(0)), "COMPLETED")
    for _ in range(2):
        asked = team.asked(an_hour=2)
        assert asked.new and asked.run is not None
        team.say(asked.run.id, "COMPLETED")
    assert team.asked(an_hour=2) == TriggerOutcome(None, False)
    assert team.asked(an_hour=3).new


def test_an_unknown_deployment(team: Team) -> None:
    with pytest.raises(ObjectNotFound):
        ask_for_run(team.client, f"{team.flow}/nope", "webhook")


def test_feedback_starts_a_run_and_another_one_after_a_crash(team: Team, tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "chat.inbox")
    loop = dict(stage="iterative_feedback", method="kto", feedback={"sources": str(inbox.folder)}, rounds=1)
    now = [0.0]
    watch = InboxWatch(
        Recipe(name="n", base_model="org/base", artifacts=str(tmp_path), stages={"loop": loop}),
        lambda: now[0],
    )
    trigger = FeedbackTrigger(team.client, f"{team.flow}/own", watch)
    assert trigger.look() is None
    inbox.add([feedback_of({"prompt": "p", "response": "r", "thumb": "up"})])
    first = trigger.look()
    assert first is not None and first.tags == ["feedback"]
    inbox.add([feedback_of({"prompt": "q", "response": "r", "thumb": "up"})])
    assert trigger.look() is None, "the run has not begun"
    team.say(first.id, "CRASHED")
    second = trigger.look()
    assert second is not None and second.id != first.id
    team.client.delete_flow_run(second.id)
    now[0] += 3600
    second = trigger.look()
    assert second is not None, "somebody deleted it"
    team.say(second.id, "FAILED")
    now[0] += 3600
    assert trigger.look() is None, "it would fail again"
    inbox.add([feedback_of({"prompt": "s", "response": "r", "thumb": "up"})])
    assert trigger.look() is not None
