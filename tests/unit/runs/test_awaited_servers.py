"""The servers that a stage asks: reached, awaited for a bounded time, or refused in one sentence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import evaluation.evaluation_stage
import rlhf_core.stages.ppo.ppo_stage
from rlhf_core.config import PPO, OpenAIJudge
from rlhf_core.config.gates import AskedServer
from rlhf_core.runs import awaited_servers
from rlhf_core.runs.awaited_servers import require_servers, why_unreachable
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.machine import Unreachable
from tests.support.chat_endpoint import completion, serving
from tests.support.evaluations import evaluate, make_setting
from tests.support.stage_request import stage_request


class Begun(Exception):
    """The stage has gone on to its processes."""


def begin(*_: object) -> None:
    raise Begun


@pytest.fixture
def closed() -> Iterator[str]:
    """An address that refuses connections: bound, but nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}/score"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_servers, "WAIT_SECONDS", 0.0)


def test_a_server_that_answers_anything_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # not for this machine's addresses
    with serving(lambda *_: completion("")) as endpoint:  # it knows no HEAD
        assert why_unreachable(endpoint.url) == ""
        require_servers([AskedServer("the judge m", endpoint.url, None)])
    assert endpoint.requests == []


def test_a_server_that_accepts_and_stays_silent_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited_servers, "ATTEMPT_SECONDS", 0.2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert why_unreachable(f"http://127.0.0.1:{listening.getsockname()[1]}") == ""


def test_a_closed_address_is_told_without_its_secret(closed: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = AskedServer("the reward taste", f"{closed}?key=hunter2", None)
    with pytest.raises(Unreachable) as caught:
        require_servers([server])
    assert str(caught.value) == (
        f"for 0 s the reward taste cannot reach {closed} ([Errno 111] Connection refused): start its server,"
        " or correct url, then run again"
    )
    told = capsys.readouterr().out
    assert told.startswith("waiting up to 0 s: the reward taste cannot reach") and "hunter2" not in told


def test_a_server_that_starts_meanwhile_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["refused", "refused", ""])
    paused: list[float] = []
    monkeypatch.setattr(awaited_servers, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(awaited_servers, "why_unreachable", lambda _: next(answers))
    monkeypatch.setattr(awaited_servers.time, "sleep", paused.append)
    require_servers([AskedServer("the judge m", "http://host", None)])
    assert paused == [awaited_servers.PAUSE_SECONDS] * 2 and next(answers, None) is None


def test_stored_replies_may_be_all_that_is_needed(closed: str, capsys: pytest.CaptureFixture[str]) -> None:
    require_servers([AskedServer("the judge m", closed, None)], ["the judge m"])
    assert capsys.readouterr().out.startswith("warning: the judge m cannot reach")


def test_ppo_starts_no_process_for_a_silent_server(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = rlhf_core.stages.ppo.ppo_stage
    monkeypatch.setattr(stage, "start_processes", begin)
    monkeypatch.setattr(stage, "stored_config", lambda _: {})
    monkeypatch.setattr(stage, "require_positions", lambda *_: None)
    config = PPO.model_validate(
        {"prompts": {"sources": "p.jsonl"}, "reward": closed, "advantage_estimator": "reinforce_pp"}
    )
    request = stage_request(config, {config.actor: "actor"}, seed=1)
    with pytest.raises(Unreachable, match=r"the reward .* cannot reach"):
        stage.run(request, RunDir(tmp_path))


def test_an_evaluation_starts_no_engine_for_a_silent_judge(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_setting(tmp_path, monkeypatch)
    judge = OpenAIJudge(model="m", base_url=closed, verdict_cache=str(tmp_path / "verdicts"))
    changes: dict[str, Any] = {"models": ("ppo",), "judges": (judge,)}
    monkeypatch.setattr(evaluation.evaluation_stage, "answer_all", begin)
    with pytest.raises(Unreachable, match="the judge m cannot reach"):
        evaluate(setting, **changes)
    monkeypatch.setattr(evaluation.evaluation_stage, "judges_with_verdicts", lambda *_: ["the judge m"])
    with pytest.raises(Begun):
        evaluate(setting, **changes)


def test_a_message_shows_no_password(closed: str) -> None:
    address = closed.replace("http://", "http://user:secret@") + "?token=secret"
    with pytest.raises(Unreachable) as told:
        require_servers([AskedServer("the judge m", address, None)])
    assert "secret" not in str(told.value)
    assert closed.removeprefix("http://") in str(told.value)


@pytest.mark.parametrize("address", ["http://localhost:PORT/v1", "http://.:80", "http://127.0.0.1:99999/v1"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    assert why_unreachable(address)


def test_an_address_that_is_none_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(awaited_servers, "WAIT_SECONDS", 600.0)
    with pytest.raises(Unreachable, match=r"cannot reach http://localhost:PORT/v1 .*correct url"):
        require_servers([AskedServer("the judge m", "http://localhost:PORT/v1", None)])
    assert "waiting" not in capsys.readouterr().out
