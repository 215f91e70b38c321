"""Runs the flow with a Prefect server in another process, as a team does: names and artifacts are on the
server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from rlhf_core.cluster.rank_environment import free_port
from tests.support import micro
from tests.support.micro import WAIT_SECONDS, ask, wait_until
from tests.support.programs import captured, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("prefect")) as (url, _):
        yield url


@contextmanager
def serving(home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yields a server's API URL and its process."""
    port = free_port()
    environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)]
    process = logged(command, home / "log.txt", env=environment)
    url = f"http://127.0.0.1:{port}/api"
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        while True:
            try:
                ask(url, "/health")
                break
            except OSError:
                assert process.poll() is None, (home / "log.txt").read_text()[-2000:]
                assert time.monotonic() < deadline, (home / "log.txt").read_text()[-2000:]
                time.sleep(0.5)
        yield url, process
    finally:
        process.terminate()
        process.wait(timeout=WAIT_SECONDS)


def test_a_run_is_visible_on_the_server(server: str, material: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "publish-base",
        "base_model": str(material / "base"),
        "artifacts": str(tmp_path / "artifacts"),
        "stages": {"publication": {"model": "base"}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = os.environ | {"PREFECT_API_URL": server, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "recipe.yaml")]
    done = captured(command, env=environment, timeout=WAIT_SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (flow,) = ask(server, "/flow_runs/filter", {})
    assert flow["name"].startswith("publish-base-") and flow["state_type"] == "COMPLETED"
    (record,) = (tmp_path / "artifacts" / "publish-base" / "runs").glob("*.json")
    assert json.loads(record.read_text())["name"] == flow["name"] and record.with_suffix(".html").is_file()
    # the server makes task runs of events, later
    wait_until(
        lambda: "publication" in {task["name"] for task in ask(server, "/task_runs/filter", {})},
        "the stage's task run",
    )
    keys = {artifact["key"] for artifact in ask(server, "/artifacts/filter", {})}
    assert {"publication-metrics", "publication-published"} <= keys
    wait_until(
        lambda: any("published" in entry["message"] for entry in ask(server, "/logs/filter", {"limit": 200})),
        "the stage's own log, which is relayed",
    )


@pytest.mark.parametrize("proxy", ["", "http://me:secret@127.0.0.1:9"])
def test_a_dead_server_is_reported_in_one_sentence(material: Path, tmp_path: Path, proxy: str) -> None:
    """Also one that a dead proxy is in front of."""
    stages = {"publication": {"model": "base"}}
    recipe = dict(
        name="r", base_model=str(material / "base"), artifacts=str(tmp_path / "artifacts"), stages=stages
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    api = "http://prefect.invalid/api" if proxy else f"http://127.0.0.1:{free_port()}/api"
    environment = os.environ | {"PREFECT_API_URL": api, "PYTHONPATH": str(ROOT), "http_proxy": proxy}
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "recipe.yaml")]
    done = captured(command, env=environment, timeout=WAIT_SECONDS, cwd=tmp_path)
    assert (
        done.returncode == 3 and "no Prefect server answers" in done.stderr and "Traceback" not in done.stderr
    )
    assert ("through the proxy 127.0.0.1:9 that http_proxy names" in " ".join(done.stderr.split())) is bool(
        proxy
    ), done.stderr
    assert "secret" not in done.stderr


@pytest.mark.long
def test_a_server_that_stops_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """The stage in progress finishes and stays done."""
    here = tmp_path / "here"
    # Prefect's own default makes a minute of it
    environment = micro.build(here) | {"PREFECT_CLIENT_MAX_RETRIES": "1"}
    (here / "slow.json").write_text('{"until": "go"}')
    (tmp_path / "home").mkdir()
    with serving(tmp_path / "home") as (url, server):
        run = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "stage", "sft", "recipe.yaml"],
            cwd=here,
            env=environment | {"PREFECT_API_URL": url},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        micro.wait_until(lambda: micro.begun(here), "the stage to begin")
        server.kill()
        server.wait()
        (here / "go").touch()
        _, told = run.communicate(timeout=WAIT_SECONDS)
    assert run.returncode == 3, told
    assert f"Prefect's server at {url} stopped answering" in told, told
    assert "Traceback" not in told, told
    assert list((here / "artifacts" / "stages").glob("sft-*/result.json"))
