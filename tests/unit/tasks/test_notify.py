"""Webhooks: messages arrive once and in order, a bad receiver causes no delay, and the URL stays secret."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State, StateType

import tasks.notify
import tasks.served
from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config import EVENTS, Recipe
from rlhf_core.preflight.machine_checks import check_machine
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.plan import plan
from tasks.notify import Sender, notify_state
from tasks.served import SERVED_ENV
from tests.support.programs import captured
from tests.support.webhook import TOKEN, receiving

ROOT = Path(__file__).parents[3]


def recipe(**notify: Any) -> Recipe:
    stages = {"sft": {"data": {"sources": "/data/train.jsonl"}}}
    return recipe_of(
        {"name": "tiny", "base_model": "org/model", "notify": {"url_env": "HOOK", **notify}, "stages": stages}
    )


def send(url: str, *numbers: int, timeout: float = 60) -> Sender:
    sender = Sender(url, "HOOK", timeout, pause=0.01)
    for number in numbers:
        sender.put({"event": "stage", "number": number})
    return sender


def test_messages_arrive_in_order() -> None:
    with receiving() as receiver:
        assert send(receiver.url, *range(20)).flush(60)
        assert [message["number"] for message in receiver.got] == list(range(20))


@pytest.mark.parametrize(
    ("answers", "received", "left"),
    [([500, 429], [1, 2], []), ([404], [2], []), ([302], [2], []), ([503] * 3, [2], [])],
)
def test_messages_to_a_busy_receiver_are_retried_and_refused_ones_are_not(
    answers: list[int], received: list[int], left: list[int]
) -> None:
    with receiving() as receiver:
        receiver.answers = list(answers)
        assert send(receiver.url, 1, 2).flush(60)
        assert [message["number"] for message in receiver.got] == received and receiver.answers == []


def test_a_lost_message_is_logged_once_without_the_url(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:{free_port()}/{TOKEN}"
    with caplog.at_level(logging.DEBUG):
        assert send(url, *range(5)).flush(60)
    (line,) = [record.getMessage() for record in caplog.records if "webhook" in record.getMessage()]
    assert line == "the webhook in HOOK does not accept messages (ConnectError); the run continues without it"
    assert TOKEN not in caplog.text


def test_a_hanging_receiver_does_not_delay_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as receiver:
        receiver.hang = True
        start = time.monotonic()
        sender = send(receiver.url, *range(50), timeout=5)
        assert not sender.flush(0.3) and time.monotonic() - start < 100, "50 messages of 5 s each"
        receiver.hang = False  # it recovers
        receiver.released.set()
        assert sender.flush(60) and receiver.got[-1]["number"] == 49


@pytest.mark.slow
def test_a_process_ends_soon_also_when_the_receiver_hangs() -> None:
    script = (
        "import atexit, time\n"
        "from tasks.notify import Sender\n"
        "end = []\n"
        "atexit.register(lambda: print(time.monotonic() - end[0]))  # runs after the sender's\n"
        "sender = Sender(__import__('os').environ['HOOK'], 'HOOK', 60)\n"
        "sender.put({'event': 'completed'})\n"
        "end.append(time.monotonic())\n"
    )
    with receiving() as receiver:
        for hang in (True, False):
            receiver.hang = hang
            environment = os.environ | {"HOOK": receiver.url, "PYTHONPATH": str(ROOT)}
            done = captured([sys.executable, "-c", script], env=environment, timeout=200)
            assert done.returncode == 0, done.stderr
            assert float(done.stdout) < 30 and TOKEN not in done.stdout + done.stderr
            assert ("did not accept 1 messages" in done.stderr) == hang
        assert receiver.events == ["completed"]


@pytest.mark.parametrize(
    ("state", "events"),
    [
        (StateType.RUNNING, ["scheduled", "running"]),
        (StateType.COMPLETED, ["completed"]),
        (StateType.FAILED, ["failed"]),
        (StateType.CRASHED, ["crashed"]),
        (StateType.CANCELLING, ["cancelled"]),
    ],
)
def test_each_state_of_a_scheduled_run(
    state: StateType, events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = {"recipe": recipe().model_dump(mode="json")}
    deployment = uuid4()
    (tmp_path / "served.json").write_text(json.dumps({str(deployment): own}))
    monkeypatch.setenv(SERVED_ENV, str(tmp_path / "served.json"))
    run: Any = SimpleNamespace(
        id=uuid4(),
        name="a-run",
        deployment_id=deployment,
        run_count=1,
        parameters=own,
        expected_start_time=datetime(2026, 1, 2, 3, tzinfo=UTC),
    )
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        flow: Any = SimpleNamespace(name="alignment")
        notify_state(flow, run, State(type=state, message="because of this\nand that"))
        assert tasks.notify._senders[receiver.url].flush(60)
        assert receiver.events == events
        assert all(
            message["run_id"] == str(run.id) and message["recipe"] == "tiny" for message in receiver.got
        )
        if events[0] == "scheduled":
            assert receiver.got[0]["at"] == "2026-01-02T03:00:00+00:00"
        if state == StateType.FAILED:
            assert receiver.got[0]["text"] == "tiny: failed: because of this"
        run.id = uuid4()
        run.parameters = {"recipe": own["recipe"] | {"name": "another"}}
        notify_state(flow, run, State(type=state))
        # a recipe that the run is refused tells nobody
        assert tasks.notify._senders[receiver.url].flush(60) and receiver.events == events


def test_a_recipe_without_notify_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(tasks.notify, "recipe_of_run", lambda given, *_: calls.append(given))
    flow: Any = SimpleNamespace(name="alignment")
    for parameters in ({"recipe": {"name": "tiny", "notify": None}}, {"recipe": "recipe.yaml"}):
        run: Any = SimpleNamespace(id=uuid4(), deployment_id=None, parameters=parameters)
        notify_state(flow, run, State(type=StateType.COMPLETED))
    assert calls == ["recipe.yaml"]


def test_a_recipe_given_as_a_path_is_read_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(
        tasks.served, "given_recipe", lambda given, *_: calls.append(given) or recipe(events=["gate"])
    )
    flow: Any = SimpleNamespace(name="alignment")
    runs: list[Any] = [
        SimpleNamespace(id=uuid4(), name="x", deployment_id=None, run_count=1, parameters={"recipe": str(i)})
        for i in (1, 2)
    ]
    for run in (runs[0], runs[0], runs[1], runs[0]):
        notify_state(flow, run, State(type=StateType.RUNNING))
    assert calls == ["1", "2"]


def test_only_configured_events_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        for event in EVENTS:
            tasks.notify.send(recipe(events=["failed", "gate"]), event, "x", {})
        assert tasks.notify._senders[receiver.url].flush(60) and receiver.events == ["failed", "gate"]


@pytest.mark.parametrize("url", [TOKEN, "https://[hooks.example/x"])
def test_a_missing_variable_is_reported_before_the_run_and_once_in_it(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks.notify, "_warned", set())
    monkeypatch.setenv("HOOK", url)
    (problem,) = check_machine(plan(recipe()), ())
    assert (
        problem
        == "notify: the environment variable HOOK holds no http(s) address; set it, or leave notify out"
    )
    for _ in range(2):
        tasks.notify.send(recipe(), "running", "x", {})
    assert [r.getMessage() for r in caplog.records] == [
        "notify: the variable HOOK does not hold an http(s) address: no messages are sent about this run"
    ]


@pytest.mark.parametrize(
    ("notify", "told"),
    [
        ({"url_env": "https://hooks.example/abc"}, "notify.url_env"),
        ({"url_env": "A", "events": ["finished"]}, "notify.events.0"),
        ({"url_env": "A", "url": "x"}, "notify.url: unknown key 'url'"),
    ],
)
def test_wrong_settings_are_reported_in_sentences(notify: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace(".", r"\.")):
        recipe(**notify)


def test_a_webhook_is_in_no_digest() -> None:
    raw = {"name": "tiny", "base_model": "org/model", "stages": {"sft": {"data": {"sources": "train.jsonl"}}}}
    assert plan(recipe())["sft"].digest == plan(recipe_of(raw))["sft"].digest
