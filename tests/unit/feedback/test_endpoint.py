"""The feedback endpoint: what it stores, counts and refuses."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rlhf_core.feedback import feedback_endpoint as endpoint
from rlhf_core.feedback.feedback_endpoint import application, by_name
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions

TOKEN = "t" * 32
ROW = {"prompt": "hello there", "response": "hi", "thumb": "up"}


@pytest.fixture
def box(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "chat.inbox")


@pytest.fixture
def client(box: Inbox) -> TestClient:
    app = application(by_name([box.folder], lambda: Questions(["what is the capital of France"])), TOKEN)
    return TestClient(app, base_url="http://127.0.0.1:4300", headers={"authorization": f"Bearer {TOKEN}"})


def test_rows_come_as_an_object_a_list_or_lines(client: TestClient, box: Inbox) -> None:
    other = ROW | {"prompt": "other"}
    third = ROW | {"prompt": "third"}
    assert client.post("/feedback/chat", json=ROW).json()["new"] == 1
    assert client.post("/feedback/chat", json=[ROW, other]).json() | {"faults": []} == {
        "read": 2, "new": 1, "duplicate": 1, "leaked": 0, "wrong": 0, "faults": [], "unusable": {}, "personal": {},
    }  # fmt: skip
    assert (
        client.post(
            "/feedback/chat?source=app&annotator=ann", content=f"{json.dumps(ROW)}\n{json.dumps(third)}\n"
        ).json()["new"]
        == 2
    )
    assert client.get("/feedback").json() == {"chat": {"thumb": 4}}
    last = list(box.rows(("thumb",)))[-1].row
    assert (last.source, last.annotator) == ("app", "ann")


def test_lines_hold_ends_of_lines_of_unicode(client: TestClient, box: Inbox) -> None:
    rows = [ROW | {"response": "one\u2028two\x85three"}, ROW | {"response": "four"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert client.post("/feedback/chat", content=lines.encode()).json()["new"] == 2


def test_what_became_of_each_row_is_counted(client: TestClient) -> None:
    rows = [
        {"prompt": "What is the capital of France?", "response": "x", "thumb": 1},
        ROW | {"response": "ask ann@example.org"},
        {"a": 1},
        5,
    ]
    told = client.post("/feedback/chat", json=rows).json()
    assert (told["new"], told["leaked"], told["wrong"], told["personal"]) == (1, 1, 2, {"EMAIL_ADDRESS": 1})
    assert told["faults"][1] == "row 4: a row must be a JSON object, found int"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff", 400),
        (b'"\\ud800"', 400),
        (b"[" * 100_000, 400),
        (b"[]", 422),
        (b"7", 422),
        (b'{"prompt": 1}', 422),
    ],
)
def test_bodies_without_feedback(client: TestClient, box: Inbox, body: bytes, status: int) -> None:
    assert client.post("/feedback/chat", content=body).status_code == status
    assert not box.count(("thumb",))


def test_an_unknown_inbox_and_other_methods(client: TestClient) -> None:
    assert client.post("/feedback/nope", json=ROW).status_code == 404
    assert client.post("/feedback/../chat", json=ROW).status_code in (404, 405)
    assert client.delete("/feedback/chat").status_code == 405


def test_a_body_that_is_too_large_is_not_read(
    client: TestClient, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "LARGEST_REQUEST", 1000)
    assert client.post("/feedback/chat", json=[ROW] * 100).status_code == 413
    assert not box.exists


def test_more_rows_than_a_request_may_have_are_refused(
    client: TestClient, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MOST_ROWS", 2)
    answer = client.post("/feedback/chat", json=[ROW] * 3)
    assert answer.status_code == 413 and "3 rows: send at most 2" in answer.json()["error"]
    assert not box.exists and client.post("/feedback/chat", json=[ROW] * 2).status_code == 200


def test_a_large_body_is_read_outside_of_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = endpoint.rows_of_body

    def read(body: bytes) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        seen.append(len(body))
        return real(body)

    monkeypatch.setattr(endpoint, "rows_of_body", read)
    assert client.post("/feedback/chat", json=ROW).status_code == 200 and seen


def test_nothing_is_taken_without_the_token(client: TestClient, box: Inbox) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer x"}):
        assert client.post("/feedback/chat", json=ROW, headers=headers).status_code == 401
        assert client.get("/feedback", headers=headers).status_code == 401
    assert not box.exists


def test_two_inboxes_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two inboxes have the same name"):
        by_name([tmp_path / "a" / "x.inbox", tmp_path / "b" / "x.inbox"], lambda: Questions(()))


def test_requests_side_by_side_lose_nothing(client: TestClient, box: Inbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def send(number: int) -> Any:
        return client.post("/feedback/chat", json=ROW | {"prompt": f"q{number % 40}"}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(send, range(80))) == {200}
    assert box.count(("thumb",)) == 40


def test_a_full_disk_is_said_and_loses_nothing(
    client: TestClient, box: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post("/feedback/chat", json=ROW).json()["new"] == 1
    opened = Inbox._open

    def small(self: Inbox) -> sqlite3.Connection:
        database = opened(self)
        database.execute(f"PRAGMA max_page_count = {database.execute('PRAGMA page_count').fetchone()[0]}")
        return database

    rows = [ROW | {"prompt": f"number {i} " + 900 * "x"} for i in range(40)]
    with monkeypatch.context() as patched:
        patched.setattr(Inbox, "_open", small)
        refused = client.post("/feedback/chat", json=rows)
    assert refused.status_code == 507
    assert (
        refused.json()["error"]
        == "the inbox chat cannot be written to: its disk is full; free some space, and send all rows again"
    )
    assert client.post("/feedback/chat", json=rows).json()["new"] == 40
    assert len(list(box.rows(("thumb",)))) == 41
