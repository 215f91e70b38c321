"""The labelling page over ASGI: token, blindness, double submits, hostile texts, and requests that are
refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from evaluation.labelling.assignment import Assignment
from evaluation.labelling.label_records import ComparedPair
from evaluation.labelling.label_store import LabelFile, read_labels
from evaluation.labelling.labelling_app import LARGEST_REQUEST, application
from rlhf_core.system.pages.page_server import Protected
from tests.support.labelling import SECRET, assignment, pairs

TOKEN = "a token of the tests"
SECRETS = (
    "secret",
    "model",
    "baseline",
    "chosen",
    "rejected",
    "q0",
    "q1",
    "uid",
    "answer_a",
    "answer_b",
    "shown_first",
)


@pytest.fixture
def work(tmp_path: Path) -> Assignment:
    return assignment(tmp_path / "labels.jsonl", 10, repeat=0.5, per_item=2)


@pytest.fixture
def client(work: Assignment) -> Iterator[TestClient]:
    with TestClient(Protected(application(work), TOKEN), base_url="http://127.0.0.1:8020") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


def following(client: TestClient, annotator: str = "Ann") -> dict[str, Any]:
    return dict(client.get("/api/next", params={"annotator": annotator}).raise_for_status().json())


def send(
    client: TestClient, task: str, choice: int | None = 0, annotator: str = "Ann", **more: Any
) -> httpx.Response:
    body = {"annotator": annotator, "task": task, "choice": choice, "seconds": 1.5, **more}
    return client.post("/api/label", content=json.dumps(body))


@pytest.mark.parametrize(
    "path", ["/", "/label?annotator=Ann", "/agreement", "/static/label.js", "/api/next?annotator=Ann"]
)
def test_nothing_is_read_without_the_token(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200
    del client.headers["authorization"]
    assert client.get(path).status_code == 401


@pytest.mark.parametrize("path", ["/api/label", "/api/undo"])
def test_nothing_is_written_without_the_token_or_from_another_page(
    client: TestClient, work: Assignment, path: str
) -> None:
    body = {"annotator": "Ann", "task": following(client)["task"], "choice": 0, "seconds": 1}
    assert client.post(path, json=body, headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get(path).status_code == 405
    del client.headers["authorization"]
    assert client.post(path, json=body).status_code == 401
    assert work.file.labels == []


def test_no_response_tells_a_model_a_source_or_which_answer_is_which(
    client: TestClient, work: Assignment
) -> None:
    """Every kind of response while two annotators label everything: pages, tasks, conflicts, errors,
    headers."""
    told: list[str] = []

    def note(answer: httpx.Response) -> httpx.Response:
        told.append(f"{answer.headers} {answer.text}")
        return answer

    for name in ("Ann", "Bob"):
        while (task := note(client.get("/api/next", params={"annotator": name})).json()["task"]) is not None:
            assert note(send(client, task, 1, name, note="fine")).status_code == 200
            assert note(send(client, task, 1, name)).status_code == 409
        note(client.post("/api/undo", json={"annotator": name}))
    for path in (
        "/",
        "/label?annotator=Ann",
        "/agreement",
        "/nothing",
        "/static/label.js",
        "/static/label.css",
        "/static/app.py",
    ):
        note(client.get(path))
    note(client.post("/api/label", json={"annotator": "Ann"}))
    assert len(work.file.labels) > 20 and len(told) > 60
    texts = {text for pair in work.pairs.values() for text in (pair.answer_a, pair.answer_b)}
    assert all(any(text in one for one in told) for text in texts), "all answers were shown"
    assert {word for word in SECRETS for one in told if word in one.lower()} == set()
    assert not any(key in one for key in work.pairs for one in told)


def test_ids_of_tasks_follow_from_no_text_alone(tmp_path: Path) -> None:
    one, other = (
        Assignment(pairs(1), LabelFile(tmp_path / name), rules, secret)
        for name, rules, secret in _two_servers(tmp_path)
    )
    first = one.next("Ann")
    second = other.next("Ann")
    assert first is not None and second is not None and first.pair == second.pair and first.id != second.id


def _two_servers(tmp_path: Path) -> list[tuple[str, Any, str]]:
    rules = assignment(tmp_path / "rules.jsonl").rules
    return [("one.jsonl", rules, SECRET), ("other.jsonl", rules, "another secret")]


@pytest.mark.parametrize(("choice", "better"), [(0, "left"), (1, "left"), (3, "right"), (4, "right")])
def test_the_verdict_is_about_the_texts_that_were_shown(
    client: TestClient, work: Assignment, choice: int, better: str
) -> None:
    sides = set()
    for _ in range(10):
        shown = following(client)
        send(client, shown["task"], choice)
        label = work.file.labels[-1]
        winner = label.answer_a if label.verdict in ("A>>B", "A>B") else label.answer_b
        assert winner == shown[better] and (label.verdict in ("A>>B", "B>>A")) == (choice in (0, 4))
        sides.add(label.shown_first)
    assert sides == {"a", "b"}


def test_two_tabs_label_a_pair_once(client: TestClient, work: Assignment) -> None:
    one = following(client)
    other = following(client)
    assert one == other
    answer = send(client, one["task"], 1)
    assert answer.status_code == 200 and answer.json()["progress"] == {"labelled": 1, "skipped": 0, "left": 9}
    late = send(client, other["task"], 3)
    assert late.status_code == 409 and "already labelled" in late.json()["error"]
    assert late.json()["task"] == answer.json()["task"] != one["task"]
    assert len(work.file.labels) == 1


def test_a_verdict_is_sent_again_after_a_lost_answer(
    client: TestClient, work: Assignment, tmp_path: Path
) -> None:
    task = following(client)["task"]
    send(client, task)
    again = assignment(tmp_path / "labels.jsonl", 10, repeat=0.5, per_item=2)
    with TestClient(Protected(application(again), TOKEN), base_url="http://127.0.0.1:8020") as restarted:
        restarted.headers["authorization"] = f"Bearer {TOKEN}"
        assert send(restarted, task).status_code == 409
        assert following(restarted)["task"] == following(client)["task"] != task
    assert len(read_labels(tmp_path / "labels.jsonl")) == 1


def test_undo_shows_the_pair_as_it_was_with_choice_and_note(client: TestClient, work: Assignment) -> None:
    for choice in (0, 4, None):
        shown = following(client)
        send(client, shown["task"], choice, note="odd \ud800 one" if choice == 4 else None)
        back = client.post("/api/undo", json={"annotator": "ann"}).json()
        assert back["before"] == {"choice": choice, "note": "odd \ufffd one" if choice == 4 else None}
        assert {key: back[key] for key in shown} == shown
        send(client, shown["task"], 2)
    answer = client.post("/api/undo", json={"annotator": "Bob"})
    assert answer.status_code == 409 and answer.json()["error"] == "there is nothing to undo"


HOSTILE = (
    "</script><script>alert(1)</script>\n\n  <img src=x onerror=alert(1)> {{ 7 * 7 }} \u2028 שלום \u202e abc"
    " \x00 \U0001f600"
)


def test_hostile_texts_arrive_as_they_are(tmp_path: Path) -> None:
    pair = ComparedPair(
        uid="q0", prompt=({"role": HOSTILE, "content": HOSTILE},), answer_a=HOSTILE, answer_b="x" * 100_000
    )
    work = Assignment(
        [pair], LabelFile(tmp_path / "labels.jsonl"), assignment(tmp_path / "rules.jsonl").rules, SECRET
    )
    name = "<b>&\"'"
    with TestClient(Protected(application(work), TOKEN), base_url="http://127.0.0.1:8020") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        shown = following(client, name)
        assert shown["prompt"] == [{"role": HOSTILE, "content": HOSTILE}] and {
            shown["left"],
            shown["right"],
        } == {HOSTILE, "x" * 100_000}
        send(client, shown["task"], 0, name, note=HOSTILE)
        for path in ("/", "/agreement", "/label"):
            page = client.get(path, params={"annotator": name})
            assert name not in page.text
            assert "&lt;b&gt;&amp;" in page.text
            assert page.headers["content-type"].startswith("text/html")
    (label,) = read_labels(tmp_path / "labels.jsonl")
    assert (label.annotator, label.note, label.prompt) == (name, HOSTILE, pair.prompt)


def test_pages_have_no_script_of_their_own(client: TestClient) -> None:
    """The content security policy would refuse it."""
    for path in ("/", "/label?annotator=Ann", "/agreement"):
        page = client.get(path).text
        assert page.count("<script") == page.count('<script src="/static/label.js" defer></script>')
        assert " on" not in page.replace(" one", "").replace(" only", "")
        assert "style=" not in page
        assert "http" not in page


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("no", "the request is not JSON"),
        ("[" * 100_000, "the request is not JSON"),
        ({}, "annotator: Field required"),
        ({"choice": 5}, "choice: Input should be less than or equal to 4"),
        ({"choice": -1}, "choice: Input should be greater"),
        ({"seconds": -1.0}, "seconds: Input should be greater"),
        ({"seconds": "NaN"}, "seconds: Input should be a finite number"),
        ({"note": "x" * 10_001}, "note: String should have at most"),
        ({"annotator": " "}, "give a name of 1 to 40 letters"),
        ({"chosen": 1}, "chosen: Extra inputs are not permitted"),
        ({"\ud800": 1}, "unable to parse raw data as a unicode string"),
    ],
)
def test_a_wrong_request_is_told_and_writes_nothing(
    client: TestClient, work: Assignment, body: Any, told: str
) -> None:
    whole = {"annotator": "Ann", "task": following(client)["task"], "choice": 0, "seconds": 1.0}
    content = body if isinstance(body, str) else json.dumps(whole | body if body else {})
    answer = client.post("/api/label", content=content)
    assert answer.status_code == 400 and told in answer.json()["error"]
    assert work.file.labels == []


def test_a_large_request_is_refused_before_it_is_read(client: TestClient) -> None:
    assert client.post("/api/label", content=b" " * (LARGEST_REQUEST + 1)).status_code == 413
    assert client.post("/api/label", content=iter([b"{}"])).status_code == 413, "without a length"
    chunked = {"content-length": "2", "transfer-encoding": "chunked"}
    # chunks would decide the length
    assert client.post("/api/label", content=b"{}", headers=chunked).status_code == 413


def test_a_full_disk_is_told_and_the_pair_stays(
    client: TestClient, work: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = following(client)
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        answer = send(client, shown["task"])
    assert answer.status_code == 507 and answer.json()["error"].startswith("the label was not saved: ")
    assert work.file.labels == [] and following(client) == shown
    assert send(client, shown["task"]).status_code == 200


def test_the_list_of_annotators_and_a_page_without_a_name(client: TestClient) -> None:
    send(client, following(client, "Zoë & Co")["task"], annotator="Zoë & Co")
    page = client.get("/").text
    assert (
        "/label?annotator=Zo%C3%AB%20%26%20Co" in page and "Zoë &amp; Co" in page and "0 of 10 pairs" in page
    )
    assert client.get("/label?annotator=", follow_redirects=False).status_code == 303
    assert 'data-name="Zoë &amp; Co"' in client.get("/label?annotator=zo%C3%AB+%26+co").text
