"""The endpoint for triggers: who may start what, and how often."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pytest
from httpx import ConnectError
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running, Scheduled
from starlette.testclient import TestClient

from flows.triggers.runs import TriggerOutcome
from flows.triggers.trigger_endpoint import MOST_WAITING, application
from tests.support.micro import WAIT_SECONDS, wait_until

TOKEN = "t" * 32
NAME = "loop/micro"


class Server:
    """In place of Prefect's: the runs that were asked for; `limit` of them are started. A run is there until
    `end`."""

    def __init__(self) -> None:
        self.runs: list[FlowRun] = []
        self.limit = 3
        self.inside = 0
        self.most_inside = 0
        self.here: FlowRun | None = None
        self.fault: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def ask(self, name: str) -> TriggerOutcome:
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            assert self.free.wait(WAIT_SECONDS)
            if self.fault:
                raise self.fault
            if self.here:
                return TriggerOutcome(self.here, False)
            if len(self.runs) >= self.limit:
                return TriggerOutcome(None, False)
            self.here = FlowRun(
                id=uuid4(), flow_id=UUID(int=0), name=f"run {len(self.runs)}", state=Scheduled()
            )
            self.runs.append(self.here)
            return TriggerOutcome(self.here, True)
        finally:
            self.inside -= 1


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(server: Server) -> TestClient:
    return TestClient(
        application(server.ask, [NAME], TOKEN),
        base_url="http://127.0.0.1:4301",
        headers={"authorization": f"Bearer {TOKEN}"},
    )


def test_a_request_starts_a_run_and_the_next_one_finds_it(client: TestClient, server: Server) -> None:
    first = client.post(f"/trigger/{NAME}")
    assert first.status_code == 202
    assert first.json() == dict(run=str(server.runs[0].id), name="run 0", state="Scheduled", started=True)
    server.runs[0].state = Running()
    again = client.post(f"/trigger/{NAME}")
    assert again.status_code == 200 and again.json() == first.json() | {"state": "Running", "started": False}


def test_runs_of_an_hour_are_bounded(client: TestClient, server: Server) -> None:
    codes = []
    for _ in range(5):
        codes.append(client.post(f"/trigger/{NAME}").status_code)
        server.here = None
    assert codes == [202, 202, 202, 429, 429] and len(server.runs) == 3


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer x"},
        {"x-webhook-secret": "x"},
        {"x-webhook-secret": ""},
        {"authorization": "Bearer x", "x-webhook-secret": TOKEN},
    ],
)
def test_nothing_starts_without_the_token(server: Server, headers: dict[str, str]) -> None:
    client = TestClient(application(server.ask, [NAME], TOKEN), base_url="http://127.0.0.1:4301")
    assert client.post(f"/trigger/{NAME}", headers=headers).status_code == 401
    assert client.post("/trigger/other", headers=headers).status_code == 401, "nor does it say what there is"
    assert server.runs == []


def test_the_secret_of_a_hub_webhook_is_the_token(server: Server) -> None:
    client = TestClient(application(server.ask, [NAME], TOKEN), base_url="http://127.0.0.1:4301")
    assert (
        client.post(f"/trigger/{NAME}", headers={"x-webhook-secret": TOKEN}, json={"event": {}}).status_code
        == 202
    )


def test_a_foreign_host_and_page_are_refused(client: TestClient, server: Server) -> None:
    assert client.post(f"/trigger/{NAME}", headers={"host": "evil.example"}).status_code == 421
    assert client.post(f"/trigger/{NAME}", headers={"origin": "http://evil.example"}).status_code == 403
    assert server.runs == []


@pytest.mark.parametrize(
    "path",
    ["/trigger/alignment/other", "/trigger/", "/trigger/loop/micro/", "/trigger/loop%2Fmicro-scheduled", "/"],
)
def test_other_names_are_unknown(client: TestClient, server: Server, path: str) -> None:
    assert client.post(path).status_code == 404
    assert server.runs == []


def test_other_methods_start_nothing(client: TestClient, server: Server) -> None:
    assert client.get(f"/trigger/{NAME}").status_code == 405
    assert server.runs == []


def test_requests_at_once_start_one_run_and_few_of_them_wait(client: TestClient, server: Server) -> None:
    server.free.clear()
    with client, ThreadPoolExecutor(60) as pool:  # one event loop for all requests
        sent = [pool.submit(lambda: client.post(f"/trigger/{NAME}").status_code) for _ in range(60)]
        wait_until(lambda: sum(one.done() for one in sent) == 60 - MOST_WAITING, "the others to be refused")
        server.free.set()
        codes = [one.result() for one in sent]
    assert server.most_inside == 1 and len(server.runs) == 1
    assert (codes.count(202), codes.count(200), codes.count(429)) == (1, MOST_WAITING - 1, 60 - MOST_WAITING)


def test_a_server_that_does_not_answer_is_told(client: TestClient, server: Server) -> None:
    server.fault = ConnectError("refused")
    answer = client.post(f"/trigger/{NAME}")
    assert answer.status_code == 503
    assert answer.json() == {"error": "Prefect's server did not answer (ConnectError)"}
    server.fault = None
    assert client.post(f"/trigger/{NAME}").status_code == 202
