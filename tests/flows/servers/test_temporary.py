"""Ctrl-C in a terminal reaches the command and its temporary Prefect server; the server must outlive it until
the run has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.support.micro import ROOT
from tests.support.programs import captured, hear_ctrl_c

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = """
import time, httpx
from tasks.server_process import ours
from tasks.temporary_server import start_server
start_server()
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(2)
    print("answers", httpx.get(ours.api_url + "/health").status_code, ours.server_process.poll(), flush=True)
"""
ASKED = """
import os, httpx
from pathlib import Path
from rlhf_core.system.processes import child_environment
from tasks.server_process import ours
from tasks.temporary_server import start_server
start_server()
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(len(client.read_flow_runs()))
route = ours.api_url + "/flow_runs/filter"
evil = {"Host": "evil.example"}, {"Origin": "http://evil.example"}
print([httpx.post(route, json={}, headers=headers).status_code for headers in ({}, *evil)])
command = Path(f"/proc/{ours.server_process.pid}/cmdline").read_text()
print(len(ours.auth) > 40, ours.auth in command, ours.auth in child_environment().values())
"""
CALLED = """
import os, httpx
from flows.alignment import alignment
from tasks.server_process import ours
try:
    alignment("missing.yaml")
except Exception as error:
    print(error)
print(os.environ["PREFECT_API_URL"] == ours.api_url, httpx.post(ours.api_url + "/flow_runs/filter", json={}).status_code)
"""
PREPARED = """
import time
from tasks.server_process import ours, prepared
with prepared():
    print(ours.server_process.pid, flush=True)
    time.sleep(60)
"""


def environment_of(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    return kept | dict(
        PYTHONPATH=str(ROOT), PREFECT_HOME=str(home), PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="120"
    )


def started(script: str, home: Path) -> tuple[subprocess.Popen[str], IO[str]]:
    """Starts a script in its own process group, which Ctrl-C signals. Returns the process and its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment_of(home),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout is not None
    return process, process.stdout


@pytest.mark.long
def test_the_temporary_server_survives_ctrl_c(tmp_path: Path) -> None:
    process, told = started(SCRIPT, tmp_path)
    assert told.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert told.read() == "answers 200 None\n"
    assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_temporary_server_answers_only_its_own_process(tmp_path: Path) -> None:
    environment = environment_of(tmp_path) | {"PREFECT_API_AUTH_STRING": "another:servers"}
    done = captured([sys.executable, "-c", ASKED], env=environment, timeout=300)
    assert done.stdout == "0\n[401, 400, 403]\nTrue False False\n", done.stderr


def test_a_flow_called_from_python_has_such_a_server(tmp_path: Path) -> None:
    """Also where a proxy is named that nobody answers at."""
    kept = {
        name: value for name, value in environment_of(tmp_path).items() if not name.lower().endswith("_proxy")
    }
    environment = kept | {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}
    done = captured([sys.executable, "-c", CALLED], env=environment, timeout=300)
    assert "missing.yaml" in done.stdout and done.stdout.endswith("True 401\n"), done.stderr


def test_a_configured_server_is_used() -> None:
    environment = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PYTHONPATH": str(ROOT)}
    code = (
        "from tasks.server_process import ours, prepared; from tasks.temporary_server import"
        " start_server\nwith prepared(): start_server()\nfrom prefect.server.api.server import"
        " SubprocessASGIServer as Server; print(ours.server_process, Server._instances)"
    )
    assert captured([sys.executable, "-c", code], env=environment, timeout=100).stdout == "None {}\n"


def test_a_prepared_server_ends_when_another_one_is_configured(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    code = (
        "from tasks.server_process import ours, prepared\n"
        "with prepared():\n"
        "    from tasks.temporary_server import start_server\n"
        "    print(ours.server_process.poll()); start_server(); print(ours.server_process.poll(), ours.begun)"
    )
    done = captured([sys.executable, "-c", code], env=environment_of(tmp_path), timeout=100)
    assert done.stdout == "None\n-9 False\n", done.stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGKILL]
)
def test_a_prepared_server_ends_with_its_command(tmp_path: Path, number: int) -> None:
    """It has written no database."""
    process, told = started(PREPARED, tmp_path)
    server = int(told.readline())
    if number == signal.SIGINT:
        time.sleep(1)
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(60) != 0
    gone_within(server, 60)
    assert not list(tmp_path.glob("*.db"))


def test_a_refused_recipe_leaves_no_server(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "{name: n, base_model: ./none, stages: {sft: {data: {sources: none.jsonl}}}}"
    )
    home = tmp_path / "home"
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml"]
    environment = environment_of(home)
    done = captured(command, cwd=tmp_path, env=environment, timeout=100, start_new_session=True)
    assert done.returncode == 2
    assert "there is no model folder" in done.stderr and "Traceback" not in done.stderr
    assert not [process for process in psutil.process_iter() if in_home(process, home)]
    assert not list(home.glob("*.db"))


@pytest.mark.long
def test_a_second_flow_of_a_process_uses_the_same_server(tmp_path: Path) -> None:
    code = (
        "from tasks.server_process import ours; from tasks.temporary_server import start_server\n"
        "start_server(); first = ours.server_process; start_server()\n"
        "print(ours.server_process is first, first.poll())"
    )
    done = captured([sys.executable, "-c", code], env=environment_of(tmp_path), timeout=300)
    assert done.stdout == "True None\n", done.stderr


def test_a_server_without_its_database_is_reported_in_one_sentence(tmp_path: Path) -> None:
    environment = environment_of(tmp_path) | {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/none/prefect.db"
    }
    code = (
        "from rlhf_core.preflight.inputs import MachineLacks; from tasks.temporary_server import"
        " start_server\ntry: start_server()\nexcept MachineLacks as error: print(error)"
    )
    done = captured([sys.executable, "-c", code], env=environment, timeout=100)
    assert done.stdout.startswith(
        "Prefect's temporary server ended, or did not answer within 120 s (its output is"
    )
    assert "unable to open database file" in done.stderr


def in_home(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("PREFECT_HOME") == str(home) and "orphan_watcher.py" not in " ".join(
            process.cmdline()
        )
    except psutil.Error:
        return False


def gone_within(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"process {pid} has not ended within {seconds:g} s"
        time.sleep(0.1)
