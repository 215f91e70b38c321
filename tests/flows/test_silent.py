"""Runs without a worker on the server of `alignflow serve`: a killed one is marked as crashed, an active one
is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import emit_event
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.settings.models.flows import FlowsSettings

from flows.serving.silent_runs import SILENT, SILENT_SECONDS, tell_suspended, watch_silent_runs
from tests.support import micro
from tests.support.micro import Serve, ask, wait_until

HEARTBEAT_SECONDS = 30
WINDOW_SECONDS = 65
HANGS_SECONDS = 110


def within(seconds: int) -> AutomationCore:
    """Returns the automation with another window."""
    return SILENT.model_copy(
        update={"trigger": SILENT.trigger.model_copy(update={"within": timedelta(seconds=seconds)})}
    )


def window(automation: AutomationCore) -> float:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger.within.total_seconds()


def test_a_silent_run_missed_more_than_two_heartbeats() -> None:
    default = FlowsSettings.model_fields["heartbeat_frequency"].default
    assert window(SILENT) == SILENT_SECONDS >= 3 * default


def test_an_earlier_automation_is_updated(prefect: str) -> None:
    with SyncPrefectClient(api=prefect) as client:
        client.create_automation(within(90))
        watch_silent_runs(client)
        watch_silent_runs(client)
        (found,) = client.read_automations_by_name(SILENT.name)
        assert window(found) == SILENT_SECONDS
        client.delete_automation(found.id)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_suspended_run_is_not_silent(prefect: str) -> None:
    """Two runs send heartbeats and stop. The suspended one, which waits for a person, stays, also after a
    heartbeat that arrives late. The server drops an event when its database is busy, so each is sent again."""
    flow = ask(prefect, "/flows/", {"name": "waits"})["id"]

    def heartbeat(made: str) -> None:
        for _ in range(3):
            resource = {"prefect.resource.id": f"prefect.flow-run.{made}"}
            emit_event("prefect.flow-run.heartbeat", resource=resource)
            time.sleep(1)

    def run(state: dict[str, str]) -> str:
        made = str(ask(prefect, "/flow_runs/", {"flow_id": flow, "state": {"type": "RUNNING"}})["id"])
        heartbeat(made)
        ask(prefect, f"/flow_runs/{made}/set_state", {"state": state, "force": True})
        return made

    def state(made: str) -> str:
        return str(ask(prefect, f"/flow_runs/{made}")["state_type"])

    with SyncPrefectClient(api=prefect) as client:

        def told_and_marked(silent: str) -> bool:
            assert tell_suspended(client) >= 1
            return state(silent) == "CRASHED"

        made = client.create_automation(within(20))
        suspended = run({"type": "PAUSED", "name": "Suspended"})
        for _ in range(2):
            tell_suspended(client)
            silent = run({"type": "RUNNING"})
            wait_until(
                partial(told_and_marked, silent),
                "the silent run to be marked",
                again=partial(heartbeat, silent),
            )
            time.sleep(5)
            assert state(suspended) == "PAUSED"
            heartbeat(suspended)  # sent before the suspension, arrives after it
        client.delete_automation(made)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_is_marked_as_crashed_and_an_active_one_is_not(tmp_path: Path) -> None:
    """Uses shorter times than the automation's nine minutes."""
    folder = tmp_path / "here"
    environment = micro.build(folder)
    (folder / "slow.json").write_text(json.dumps({"sft": "middle", "once": HANGS_SECONDS}))
    serve = Serve(folder, environment, "--no-schedule")
    runs: list[subprocess.Popen[bytes]] = []

    def states() -> dict[str, str]:
        found = ask(api, "/flow_runs/filter", {"limit": 10})
        return {str(run["parameters"]["recipe"]["seed"]): run["state_type"] for run in found}

    try:
        api = serve.ready()
        with SyncPrefectClient(api=api, auth_string=micro.AUTH[api]) as client:
            (there,) = client.read_automations_by_name(SILENT.name)
            client.update_automation(there.id, within(WINDOW_SECONDS))
        beating = (
            environment | micro.client(api) | {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}
        )
        for seed in ("1", "2"):
            command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", f"seed={seed}"]
            with (folder / f"out{seed}.txt").open("wb") as out:
                runs.append(subprocess.Popen(command, cwd=folder, env=beating, stdout=out, stderr=out))
        wait_until(lambda: len(micro.begun(folder)) == 2, "both runs to work", told=serve.told)
        runs[1].kill()
        wait_until(
            lambda: states().get("2") == "CRASHED", "the killed run to be marked", told=lambda: str(states())
        )
        assert runs[0].wait(300) == 0, (folder / "out1.txt").read_text()[-3000:]
        assert states() == {"1": "COMPLETED", "2": "CRASHED"}
    finally:
        for run in runs:
            run.kill()
        serve.stop()
