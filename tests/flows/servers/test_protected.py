"""Attacks on `alignflow serve`: by users and web pages without its auth string, and by runs with forbidden
parameters."""

from __future__ import annotations

import http.client
import http.server
import json
import logging
import queue
import re
import shutil
import stat
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import websockets
from websockets.sync.client import connect

from rlhf_core.recipe.load_recipe import load_recipe
from tests.support import micro
from tests.support.micro import AUTH, Serve, ask, wait_until
from tests.support.programs import captured
from tests.support.sockets import beyond_loopback, listening
from tests.support.strangers import as_nobody, as_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ATTACK = """<script>
const post = (route, body) => fetch("API" + route, {method: "POST", headers: {"Content-Type": "TYPE"}, body: JSON.stringify(body)});
(async () => {
  let told = ""
  try {
    const found = await (await post("/deployments/filter", {})).json()
    for (const one of found)
      told += (await post(`/deployments/${one.id}/create_flow_run`, {state: {type: "SCHEDULED"}})).status
    told += " listed " + JSON.stringify(found)
  } catch (error) { told = "blocked: " + error }
  await fetch("/told", {method: "POST", body: told})
})()
</script>"""


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("served") / "here"
    started = Serve(folder, micro.build(folder), "--no-schedule")
    try:
        started.ready()
        yield started
    finally:
        started.stop()


@pytest.fixture
def api(serve: Serve) -> str:
    return serve.ready()


def answer(
    api: str, route: str, body: Any = None, method: str = "POST", **headers: str
) -> http.client.HTTPResponse:
    """Sends a request with the given headers and without the auth string."""
    connection = http.client.HTTPConnection(urlsplit(api).netloc, timeout=90)
    connection.request(
        method, f"/api{route}", json.dumps(body), {"Content-Type": "application/json", **headers}
    )
    return connection.getresponse()


def deployment(api: str, name: str = "alignment/micro") -> str:
    return str(ask(api, f"/deployments/name/{name}")["id"])


def ended(serve: Serve, api: str, run: str) -> dict[str, Any]:
    """Returns the final state of a run."""
    wait_until(
        lambda: serve.state(api, run) in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"),
        "the run to end",
        told=serve.told,
    )
    return dict(ask(api, f"/flow_runs/{run}")["state"])


def runs(api: str) -> int:
    return len(ask(api, "/flow_runs/filter", {"limit": 200}))


def logged(api: str, run: str) -> list[dict[str, Any]]:
    """Returns the log of a run, whose last lines Prefect sends some seconds after it ended."""
    wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
    wait_until(
        lambda: any(line["level"] >= logging.ERROR for line in ask(api, "/logs/filter", wanted)),
        "the run's log",
    )
    return list(ask(api, "/logs/filter", wanted))


def test_requests_without_the_auth_string_are_refused(serve: Serve, api: str) -> None:
    identity = deployment(api)
    before = runs(api)
    variables = {
        "state": {"type": "SCHEDULED"},
        "job_variables": {"command": f"touch {serve.folder}/without"},
    }
    for headers in ({}, {"Authorization": "Basic YWxpZ25mbG93Og=="}, {"Authorization": "Bearer x"}):
        assert answer(api, "/deployments/filter", {}, **headers).status == 401
        assert answer(api, f"/deployments/{identity}/create_flow_run", variables, **headers).status == 401
        assert answer(api, "/admin/settings", method="GET", **headers).status == 401
    with connect(
        f"{api.replace('http', 'ws')}/events/in", subprotocols=[websockets.Subprotocol("prefect")]
    ) as socket:
        socket.send(json.dumps({"type": "auth", "token": "alignflow:guessed"}))
        with pytest.raises(websockets.ConnectionClosed):
            socket.recv(timeout=90)
    assert runs(api) == before and not (serve.folder / "without").exists()


def test_a_command_without_the_auth_string_is_one_sentence(serve: Serve, api: str) -> None:
    environment = micro.environment(serve.folder) | {"PREFECT_API_URL": api}
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml"]
    done = captured(command, cwd=serve.folder, env=environment, timeout=300)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert "does not accept this shell's auth string: set PREFECT_API_AUTH_STRING" in " ".join(
        done.stderr.split()
    )


def test_other_hosts_and_origins_are_refused(api: str) -> None:
    port = urlsplit(api).port
    assert answer(api, "/health", method="GET").status == 200
    assert answer(api, "/health", method="GET", Host=f"localhost:{port}").status == 200
    for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}"):  # DNS rebinding
        refused = answer(api, "/health", method="GET", Host=host)
        assert refused.status == 400 and b"--allow-host" in refused.read()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        for method in ("GET", "POST", "OPTIONS"):
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            }
            refused = answer(api, "/deployments/filter", {}, method, **asked)
            assert refused.status == 403 and refused.getheader("access-control-allow-origin") is None
        with pytest.raises(websockets.InvalidStatus, match="403"):
            connect(f"{api.replace('http', 'ws')}/events/in", origin=websockets.Origin(origin))
    own = answer(api, "/health", method="GET", Origin=api.removesuffix("/api"))
    assert own.status == 200 and own.getheader("access-control-allow-origin") == api.removesuffix("/api")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("content", ["application/json", "text/plain"])  # with a preflight, and without
def test_a_web_page_cannot_start_a_run(api: str, tmp_path: Path, content: str) -> None:
    before = runs(api)
    told: queue.Queue[str] = queue.Queue()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(ATTACK.replace("API", api).replace("TYPE", content).encode())

        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        # and one whose name leads to this machine (DNS rebinding)
        command = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
        ]
        command.append("--host-resolver-rules=MAP evil.example 127.0.0.1")
        for host in ("127.0.0.1", "evil.example"):
            address = f"http://{host}:{pages.server_address[1]}/"
            browser = subprocess.Popen(
                [*command, "--remote-debugging-port=0", address],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                assert told.get(timeout=180).startswith("blocked: TypeError")
            finally:
                browser.terminate()
                browser.wait(30)
        pages.shutdown()
    command += ["--dump-dom", f"http://evil.example:{urlsplit(api).port}/"]
    text = captured(command, timeout=180).stdout
    assert "does not answer for that host" in text
    assert runs(api) == before


def test_it_listens_on_loopback_alone_also_while_a_run_goes_on(serve: Serve, api: str) -> None:
    slow = serve.folder / "slow.json"
    slow.write_text('{"until": "go"}')
    run = serve.run(api, "alignment/micro", overrides=["seed=11"])
    try:
        serve.reaches(api, run, "RUNNING")
        assert listening(serve.process.pid) and not beyond_loopback(serve.process.pid)
    finally:
        (serve.folder / "go").touch()
    while serve.state(api, run) == "RUNNING":
        assert listening(serve.process.pid) and not beyond_loopback(serve.process.pid)
    assert ended(serve, api, run)["type"] == "COMPLETED"
    slow.unlink()
    (serve.folder / "go").unlink()


def test_the_live_page_needs_its_token(serve: Serve, api: str) -> None:
    found = re.search(
        r"artifacts is shown at http://(127\.0\.0\.1:\d+)/\?token=\.\.\. \(",
        (serve.folder / "serve.txt").read_text(),
    )
    assert found, serve.told()
    page = f"http://{found[1]}/api/api"  # of `answer`

    def status(**headers: str) -> int:
        try:
            return answer(page, "", method="GET", **headers).status
        except ConnectionRefusedError:
            return 0

    wait_until(lambda: status() == 401, "the live page to start", told=serve.told)
    token = (serve.folder / "home" / "dashboard-token").read_text().strip()
    assert status(Authorization=f"Bearer {token}") == 404
    assert status(Authorization=f"Bearer {AUTH[api]}") == 401
    assert status(Authorization=f"Bearer {token}", Host="evil.example") == 421


@as_root
def test_another_user_cannot_read_the_auth_string(serve: Serve, api: str, tmp_path: Path) -> None:
    place = serve.folder / "home" / "auth-string"
    for folder in place.parents[:-2]:  # pytest's own folders keep others out: let them in
        folder.chmod(0o755)
    (readable := place.with_name("readable")).touch(0o644)
    assert as_nobody("open(sys.argv[1])", str(readable)) == "allowed"
    assert as_nobody("open(sys.argv[1])", str(place)) == "PermissionError"
    processes = [
        serve.process.pid,
        *(child.pid for child in psutil.Process(serve.process.pid).children(recursive=True)),
    ]
    for pid in processes:
        assert as_nobody(f"open('/proc/{pid}/environ').read()") == "PermissionError"


@pytest.mark.long
def test_a_run_cannot_change_command_environment_or_folder(serve: Serve, api: str, tmp_path: Path) -> None:
    """Prefect's server checks the fields of a deployment's run, but not those of `POST /flow_runs/`."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'by-environment')!r}).touch()\n"
    )
    wanted: list[dict[str, Any]] = [
        {"command": f"touch {tmp_path}/by-command"},
        {"env": {"PYTHONPATH": str(tmp_path), "ALIGNFLOW_SERVED": ""}},
        {"env.PYTHONPATH": str(tmp_path)},
        {"working_dir": str(tmp_path)},
    ]
    identity = deployment(api)
    for variables in wanted:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(
                api,
                f"/deployments/{identity}/create_flow_run",
                {"state": {"type": "SCHEDULED"}, "job_variables": variables},
            )
        assert refused.value.code == 422
    flow = ask(api, f"/deployments/{identity}")["flow_id"]
    body = dict(
        flow_id=flow, deployment_id=identity, work_pool_name="alignflow-process", work_queue_name="asked"
    )
    body |= {
        "parameters": {"recipe": "recipe.yaml"},
        "state": {"type": "SCHEDULED"},
        "job_variables": {k: v for w in wanted for k, v in w.items()},
    }
    state = ended(serve, api, ask(api, "/flow_runs/", body)["id"])
    assert state["type"] == "COMPLETED", "in the folder of `serve`, with the flow's own command"
    assert [path.name for path in tmp_path.iterdir()] == ["sitecustomize.py"]


def test_a_run_accepts_only_its_deployments_recipe_and_settings(serve: Serve, api: str) -> None:
    (serve.folder / "other.yaml").write_text(
        (serve.folder / "recipe.yaml").read_text().replace("micro", "other")
    )
    inline = load_recipe(serve.folder / "recipe.yaml").model_dump(mode="json")
    own = "a run of this deployment has the deployment's own recipe, recipe.yaml"
    before = micro.begun(serve.folder)
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"recipe": inline}, own),
        ({"recipe": "other.yaml"}, own),
        (
            {"overrides": ["loop.reward=file.py:fn"]},
            "override loop.reward: a run of a deployment may set numbers, switches and choices",
        ),
        (
            {"overrides": ["seed=7", "trust_remote_code=true"]},
            "override trust_remote_code: a run of a deployment may set numbers",
        ),
    ]
    asked = [(serve.run(api, "alignment/micro", **parameters), sentence) for parameters, sentence in wanted]
    for run, sentence in asked:
        state = ended(serve, api, run)
        assert state["type"] == "FAILED", state
        assert sentence in state["message"], state
        assert "\n" not in state["message"].strip(), state
        lines = [line["message"] for line in logged(api, run) if line["level"] >= logging.ERROR]
        (refusal,) = [line for line in lines if sentence in line]
        assert refusal.startswith(("parameter recipe: ", "override ")), lines
        assert not [line for line in lines if "\n" in line.strip()], lines
    identity = deployment(api)
    patch(api, f"/deployments/{identity}", {"parameters": {"recipe": "other.yaml", "overrides": []}})
    try:
        # it is compared with what `serve` was given
        assert own in ended(serve, api, serve.run(api, "alignment/micro"))["message"]
    finally:
        patch(api, f"/deployments/{identity}", {"parameters": {"recipe": "recipe.yaml", "overrides": []}})
    console = serve.folder / "serve.txt"
    for _, sentence in wanted:
        wait_until(
            lambda sentence=sentence: sentence in console.read_text(),
            "the console to say it",
            told=serve.told,
        )
    assert console.read_text().count("override loop.reward: ") == 1 and "Traceback" not in console.read_text()
    assert micro.begun(serve.folder) == before
    allowed = serve.run(api, "loop/micro", overrides=["loop.beta=0.25"], max_rounds=4)
    assert ended(serve, api, allowed)["type"] == "COMPLETED"
    assert "loop.round1.dpo" in micro.begun(serve.folder)


def patch(api: str, route: str, body: dict[str, Any]) -> None:
    """Changes an object of the server; Prefect answers late, or with an error, while another writer holds its
    database."""
    token = {"Authorization": micro.basic(AUTH[api])}

    def accepted() -> bool:
        try:
            return answer(api, route, body, "PATCH", **token).status == 204
        except TimeoutError:
            return False

    wait_until(accepted, "a database that is not busy")


@pytest.mark.long
def test_the_auth_string_is_kept_and_in_no_log(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    environment = micro.build(folder)
    strings = set()
    for seed in (1, 2):
        serve = Serve(folder, environment, "--no-schedule")
        try:
            api = serve.ready()
            strings.add(AUTH[api])
            assert (
                ended(serve, api, serve.run(api, "alignment/micro", overrides=[f"seed={seed}"]))["type"]
                == "COMPLETED"
            )
            running = [" ".join(process.cmdline()) for process in micro.left(folder)]
        finally:
            serve.stop()
        shutil.rmtree(folder / "modules" / "__pycache__", ignore_errors=True)
        (string,) = strings
        assert running and not [line for line in running if string.partition(":")[2] in line]
    place = folder / "home" / "auth-string"
    assert f"the auth string once: the content of {place}\n" in (folder / "serve.txt").read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    holding = [
        path
        for path in folder.rglob("*")
        if path.is_file() and string.partition(":")[2].encode() in path.read_bytes()
    ]
    assert holding == [place], "neither a log nor the database, an artifact or a stage's directory has it"
