"""Ctrl-C in a terminal reaches the command and its temporary Prefect server; the server must outlive it until the run has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.micro import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SCRIPT = """
import time, httpx
from prefect.server.api.server import SubprocessASGIServer
from tasks.temporary_server import start_server
start_server()
server = SubprocessASGIServer()
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(2)
    print("answers", httpx.get(server.api_url + "/health").status_code, server.server_process.poll(), flush=True)
"""


def test_the_temporary_server_outlives_a_ctrl_c(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    environment = kept | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.stdout.read() == "answers 200 None\n"
    assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_named_server_is_left_alone() -> None:
    environment = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PYTHONPATH": str(ROOT)}
    code = (
        "from tasks.temporary_server import start_server; start_server(); "
        "from prefect.server.api.server import SubprocessASGIServer as Server; print(Server._instances)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100).stdout == "{}\n"
