"""The life of a local server, with a small HTTP server in the place of vLLM: started, awaited, noticed when
it dies, always stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rlhf_core.config import EngineConfig, VllmJudge
from rlhf_core.rollout.vllm.environment import UNCOMPILED, compilation
from rlhf_core.rollout.vllm.key_guard import KeyGuard
from rlhf_core.rollout.vllm.vllm_server import Server, ServerFailed, serving
from rlhf_core.system.reaper import descendants

ROOT = Path(__file__).parents[3]
# What vLLM does as far as the caller sees: a worker process, /health when ready, a key for /v1. How it
# behaves comes from the model's name.
STUB = """
import http.server, json, os, socket, subprocess, sys, time
arguments = {name: value for name, value in zip(sys.argv, sys.argv[1:]) if name.startswith("--")}
kind, listener, rival = arguments["--model"], socket.socket(fileno=int(os.environ["ALIGNFLOW_LISTENER"])), socket.socket()
try:
    rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    rival.bind(listener.getsockname())
    rival.listen()
except OSError as error:
    print("a rival gets:", error.strerror, flush=True)
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("loading", kind, "for", arguments["--served-model-name"], flush=True)
if kind == "broken":
    sys.exit("no such architecture")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        status = 503 if kind == "silent" else 200 if self.path == "/health" or right else 401
        self.send_response(status)
        self.end_headers()
        model = {"id": arguments["--served-model-name"], "max_model_len": 64}
        self.wfile.write(json.dumps({"data": [model], "arguments": sys.argv}).encode())
        if kind == "mortal" and self.path == "/v1/die":
            print("out of memory", flush=True)
            os._exit(7)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = listener
server.serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "rlhf_core.rollout.vllm.vllm_server.GRACE_SECONDS", 0.5
    )  # the worker does not listen to TERM
    (tmp_path / "stub.py").write_text(STUB)

    def start(kind: str, **changes: object) -> object:
        vllm = EngineConfig.model_validate({"start_timeout": 100.0} | changes)
        log = tmp_path / "logs" / "server.log"
        return serving(
            kind, "some-model", log, vllm, seed=3, dtype="float32", max_model_len=64, command=("stub.py",)
        )

    return start


def get(server: Server, path: str, key: str | None) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(
        server.url.removesuffix("/v1") + path, headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or "{}")
    except urllib.error.HTTPError as error:
        return error.code, {}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_server_is_there_inside_the_block_and_nothing_of_it_after(stub: Callable[..., object]) -> None:
    with stub("good") as server:  # type: ignore[attr-defined]
        server.check()
        below = [server.process.pid, *descendants(server.process.pid)]
        assert len(below) == 3  # the reaper, the server, its worker
        assert server.url.startswith("http://127.0.0.1:") and server.max_model_len == 64
        status, said = get(server, "/v1/models", server.key)
        assert status == 200
        assert get(server, "/v1/models", None)[0] == get(server, "/v1/models", "wrong")[0] == 401
        arguments = list(map(str, said["arguments"]))  # type: ignore[call-overload]
    assert not any(map(alive, below))
    sent = " ".join(arguments)
    assert "--host 127.0.0.1" in sent
    assert "--max-model-len 64" in sent
    assert "--seed 3" in sent
    assert "--dtype float32" in sent
    assert "trust-remote-code" not in sent
    assert server.key not in sent
    assert server.key not in server.log.read_text()
    assert "loading good for some-model" in server.log.read_text()


def test_an_exception_in_the_block_stops_it_too(stub: Callable[..., object]) -> None:
    with pytest.raises(KeyError), stub("good") as server:  # type: ignore[attr-defined]
        below = [server.process.pid, *descendants(server.process.pid)]
        raise KeyError
    assert not any(map(alive, below))


def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(
    stub: Callable[..., object],
) -> None:
    start = time.monotonic()
    others = set(descendants(os.getpid()))
    with (
        pytest.raises(
            ServerFailed, match=r"local server of some-model ended before it was ready \(exit code 1\)"
        ) as caught,
        stub("broken"),  # type: ignore[attr-defined]
    ):
        pass
    assert "no such architecture" in str(caught.value) and time.monotonic() - start < 60
    assert set(descendants(os.getpid())) <= others


def test_a_server_that_never_gets_ready_is_waited_for_as_long_as_said(stub: Callable[..., object]) -> None:
    others = set(descendants(os.getpid()))
    with (
        pytest.raises(
            ServerFailed,
            match=r"did not answer http://127.0.0.1:\d+/health within 8 s: raise engine.start_timeout",
        ) as caught,
        stub("silent", start_timeout=8.0),  # type: ignore[attr-defined]
    ):
        pass
    assert "loading silent" in str(caught.value)
    assert set(descendants(os.getpid())) <= others


def test_no_other_process_gets_its_port_and_with_it_the_key(stub: Callable[..., object]) -> None:
    with stub("good") as server:  # type: ignore[attr-defined]
        assert "a rival gets: Address already in use" in server.log.read_text()


def test_every_path_needs_the_key_and_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k-1")
    app = Starlette(
        routes=[Route("/invocations", lambda request: PlainTextResponse("here"))],
        middleware=[Middleware(KeyGuard)],
    )
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    right = {"authorization": "Bearer k-1"}
    assert client.get("/invocations", headers=right).text == "here"
    for headers in ({}, {"authorization": "Bearer k-"}, {"authorization": "Basic k-1"}):
        assert (
            client.get("/invocations", headers=headers).status_code
            == client.get("/v1/x", headers=headers).status_code
            == 401
        )
    assert client.get("/invocations", headers={**right, "host": "evil.example"}).status_code == 400


def test_a_server_that_dies_in_the_middle_is_noticed(stub: Callable[..., object]) -> None:
    with stub("mortal") as server:  # type: ignore[attr-defined]
        get(server, "/v1/die", server.key)
        assert server.process.wait(timeout=60) == 7
        with pytest.raises(ServerFailed, match=r"local server of some-model died \(exit code 7\)") as caught:
            server.check()
    assert "out of memory" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_no_server_behind(
    number: int, stub: Callable[..., object], tmp_path: Path
) -> None:
    script = (
        "from pathlib import Path\nimport time\nimport rlhf_core.rollout.vllm.vllm_server as s\nfrom rlhf_core.config"
        " import EngineConfig\ns.GRACE_SECONDS = 0.5\nwith s.serving('good', 'm', Path('log'), EngineConfig(), seed=0,"
        " dtype='float32', max_model_len=64, command=('stub.py',)):\n    print('ready', flush=True)\n   "
        " time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert owner.stdout is not None
    assert any(line == "ready\n" for line in owner.stdout)
    below = descendants(owner.pid)
    assert len(below) == 3
    owner.send_signal(number)
    owner.wait(timeout=60)
    assert gone(below)


def test_a_server_is_one_engine_that_stays_awake() -> None:
    for vllm, complaint in (
        ({"num_engines": 2}, "one engine"),
        ({"gpus": 1, "sleep": True}, "never sleeps"),
    ):
        with pytest.raises(ValueError, match=complaint):
            VllmJudge(model="sft", engine=EngineConfig(**vllm))  # type: ignore[arg-type]
    assert VllmJudge(model="sft", engine=EngineConfig(gpus=0.5)).engine.gpus == 0.5


@pytest.mark.parametrize("split", [1, 4])
def test_on_a_gpu_host_the_model_is_split_and_takes_its_share(
    split: int, stub: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.rollout.vllm.vllm_server.num_gpus", lambda: 8)
    with stub("good", tensor_parallel_size=split, gpu_memory_utilization=0.6) as server:  # type: ignore[attr-defined]
        sent = " ".join(map(str, get(server, "/v1/models", server.key)[1]["arguments"]))  # type: ignore[call-overload]
    assert f"--tensor-parallel-size {split} " in sent
    assert "--gpu-memory-utilization 0.6" in sent
    assert "--enforce-eager" not in sent


@pytest.mark.parametrize(
    ("config", "uncompiled"),
    [
        ({"num_local_experts": 8}, True),
        ({"num_experts": 128}, True),
        ({"text_config": {"n_routed_experts": 64}}, True),
        ({"num_local_experts": 0}, False),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_a_model_with_experts_is_not_compiled_on_a_gpu(
    config: dict[str, object],
    uncompiled: bool,
    stub: Callable[..., object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compilation(str(tmp_path)) == {}, "the CPU's engine compiles nothing"
    for user in ("vllm_server", "environment"):
        monkeypatch.setattr(f"rlhf_core.rollout.vllm.{user}.num_gpus", lambda: 1)
    assert compilation("owner/name") == {}, "the Hub cannot be reached"
    monkeypatch.setattr(
        "rlhf_core.rollout.vllm.environment.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json")
    )
    assert compilation("owner/name") == (UNCOMPILED if uncompiled else {})
    with stub(str(tmp_path)) as server:  # type: ignore[attr-defined]
        sent = get(server, "/v1/models", server.key)[1]["arguments"]
    given = json.loads(sent[sent.index("--compilation-config") + 1]) if "--compilation-config" in sent else {}  # type: ignore[attr-defined,index]
    assert given == (UNCOMPILED if uncompiled else {})
