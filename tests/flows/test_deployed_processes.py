"""Runs of deployments without a process, with one that ignores its end, and the log of serve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

import flows.serving.ended_runs
import flows.serving.services
from flows.serving.ended_runs import sweep
from flows.serving.services import LOG, Services
from tests.support.micro import ask, wait_until


@pytest.mark.parametrize(
    ("listed", "now", "told"),
    [
        ("RUNNING", "RUNNING", "CRASHED"),
        ("PENDING", "PENDING", "CRASHED"),
        ("CANCELLING", "CANCELLING", "CANCELLED"),  # the worker has ended it and not reported it yet
        ("CANCELLING", "CANCELLED", "CANCELLED"),
        ("RUNNING", "COMPLETED", "COMPLETED"),  # it completed after the list was read
    ],
)
def test_runs_without_a_process_are_ended(
    prefect: str, listed: str, now: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows.serving.ended_runs, "PROCESS_SECONDS", 0.0)
    identity = ask(prefect, "/flows/", {"name": "gone"})["id"]
    deployment = ask(prefect, "/deployments/", {"name": f"{listed}-{now}", "flow_id": identity})["id"]
    run = ask(prefect, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]

    class Client(SyncPrefectClient):
        def read_flow_runs(self, **given: Any) -> list[FlowRun]:
            found = [one for one in super().read_flow_runs(**given) if str(one.id) == run]
            say(now)
            return found

    def say(state: str) -> None:
        ask(prefect, f"/flow_runs/{run}/set_state", {"state": {"type": state}, "force": True})

    with Client(api=prefect) as client:
        say("RUNNING")
        client.update_flow_run(UUID(run), infrastructure_pid=ended_process())
        say(listed)
        assert sweep(client) == (now == listed)
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == told
        say("COMPLETED")


def ended_process() -> str:
    """Returns a process that has ended, as Prefect records it."""
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"{socket.gethostname()}:{ended.stdout.strip()}"


def test_a_run_that_starts_again_is_not_judged_by_its_last_process(prefect: str) -> None:
    """A worker records a new process only after it has started it."""
    flow = ask(prefect, "/flows/", {"name": "again"})["id"]
    deployment = ask(prefect, "/deployments/", {"name": "again", "flow_id": flow})["id"]
    run = ask(prefect, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    with SyncPrefectClient(api=prefect) as client:
        client.update_flow_run(UUID(run), infrastructure_pid=ended_process())
        ask(prefect, f"/flow_runs/{run}/set_state", {"state": {"type": "PENDING"}, "force": True})
        assert sweep(client) == 0
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == "PENDING"
        assert sweep(client, at_start=True) == 1
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == "CRASHED"


def test_a_run_whose_process_was_never_started_is_ended_after_ten_minutes(
    prefect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the queue of scheduled runs, which starts one at a time."""
    flow = ask(prefect, "/flows/", {"name": "stuck"})["id"]
    deployment = ask(prefect, "/deployments/", {"name": "stuck", "flow_id": flow})["id"]
    run = ask(prefect, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    ask(prefect, f"/flow_runs/{run}/set_state", {"state": {"type": "PENDING"}, "force": True})
    with SyncPrefectClient(api=prefect) as client:
        sweep(client)
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == "PENDING"
        monkeypatch.setattr(flows.serving.ended_runs, "STUCK_SECONDS", 0.0)
        sweep(client)
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == "CRASHED"


def test_a_process_that_ignores_its_cancellation_is_ended(
    prefect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's runner sends the signal once for each run: a retried run that is cancelled again goes on. The
    engine of its flow marks it as crashed when the signal comes from elsewhere."""
    flow = ask(prefect, "/flows/", {"name": "stubborn"})["id"]
    deployment = ask(prefect, "/deployments/", {"name": "stubborn", "flow_id": flow})["id"]
    run = ask(prefect, f"/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    engine = (
        "import signal, sys, time, urllib.request\n"
        "def crash(*_):\n"
        '    body = b\'{"state": {"type": "CRASHED"}, "force": true}\'\n'
        "    asked = urllib.request.Request(sys.argv[1], body, {'content-type': 'application/json'})\n"
        "    urllib.request.urlopen(asked).read()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, crash)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", engine, f"{prefect}/flow_runs/{run}/set_state"],
        env=os.environ | {"PREFECT__FLOW_RUN_ID": run},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    with SyncPrefectClient(api=prefect) as client:
        client.update_flow_run(UUID(run), infrastructure_pid=f"{socket.gethostname()}:{process.pid}")
        ask(prefect, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
        assert sweep(client) == 0 and process.poll() is None
        monkeypatch.setattr(flows.serving.ended_runs, "IGNORED_SECONDS", 0.0)
        sweep(client)
        assert process.poll() is not None
        assert ask(prefect, f"/flow_runs/{run}")["state_type"] == "CANCELLED"


def test_the_log_has_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.serving.services, "LOG_BYTES", 1000)
    services = Services(tmp_path, "127.0.0.1", 0)
    log = tmp_path / LOG
    # appends, as server and worker do
    command = "import sys\nfor line in sys.stdin: print('x' * 600, line, flush=True)"
    with (
        log.open("ab") as out,
        subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=out) as writer,
    ):
        assert writer.stdin is not None
        for number, (size, copy) in enumerate([(604, False), (0, True), (604, True)]):
            writer.stdin.write(b"%d\n" % number)
            writer.stdin.flush()
            wait_until(lambda text=f" {number}\n": text in log.read_text(), "the line")
            services.bound_log()
            assert (log.stat().st_size, (tmp_path / f"{LOG}.1").exists()) == (size, copy)
        writer.stdin.close()
    assert (tmp_path / f"{LOG}.1").read_text().split()[1::2] == ["0", "1"]
    assert log.read_text().endswith(" 2\n\n")
