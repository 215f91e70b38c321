"""Episodes on a server of OpenEnv, against engines that answer at once: a small server that follows the protocol
and fails in every way, and one of the package where ALIGNFLOW_TEST_OPENENV names an interpreter that has it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_core.cluster.rank_environment import free_port
from rlhf_core.config.rewarding.environment_config import Environment
from rlhf_core.data.chat import Renderer
from rlhf_core.environments.agents import openenv_session
from rlhf_core.environments.agents.openenv_actions import (
    action_of,
    action_problem,
    first_object,
    shown_to,
    text_field,
    text_of,
)
from rlhf_core.environments.episode_contract import Episode
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.trajectories.trajectory import Limits
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import SampledAnswer, Sampling
from tests.support.micro import wait_until
from tests.unit.environments.test_episodes import AtOnce, renderer, run

__all__ = ["renderer"]
LIMITS = Limits(turns=4, prompt_tokens=1200, tokens=900, answer_tokens=200)
INTERPRETER = os.environ.get("ALIGNFLOW_TEST_OPENENV", "")
SERVER = """
import asyncio, json, sys
from websockets.asyncio.server import serve
from websockets.datastructures import Headers
from websockets.http11 import Response

PROPERTIES = {"metadata": {"type": "object"}, "word": {"type": "string"}}
SCHEMA = {"title": "WordAction", "properties": PROPERTIES, "required": ["word"]}
TOOLS = {"title": "CallToolAction", "properties": {"tool_name": {}, "arguments": {}}}

def http(connection, request):
    path = request.path.partition("?")[0]
    if path.endswith("/schema"):
        schema = TOOLS if path.startswith("/tools") else SCHEMA
        body = json.dumps({"action": schema, "observation": {}, "state": {}}).encode()
        if path.startswith("/plain"): return Response(404, "Not Found", Headers(), b"")
        return Response(200, "OK", Headers({"content-length": str(len(body))}), body)

def said(observation, reward=None, done=False):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

def refused(code):
    return {"type": "error", "data": {"message": "planted", "code": code}}

async def session(socket):
    fault, steps = "", 0
    async for text in socket:
        message = json.loads(text)
        data = message.get("data", {})
        if message["type"] == "reset":
            fault, steps = data.get("fault", ""), 0
            await socket.send(json.dumps(said({"said": f"begin {data.get('level', 0)}", "empty": None})))
            continue
        if data.get("type") == "list_tools":
            tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
            await socket.send(json.dumps(said({"tools": [tool]})))
            continue
        steps += 1
        if data.get("type") == "call_tool":
            answer = said({"tool_name": "add", "result": {"data": 5}, "error": None}, 0.5, steps == 2)
        elif fault == "refuse" and steps == 1: answer = refused("VALIDATION_ERROR")
        elif fault == "raise": answer = refused("EXECUTION_ERROR")
        elif fault == "hang": await asyncio.sleep(1000)
        elif fault == "close": return
        elif fault == "huge": answer = said({"said": "x" * 2**25})
        elif fault == "list": answer = {"type": "observation", "data": []}
        elif fault == "half": answer = {"type": "observation", "data": {"reward": 1}}
        elif fault == "text": answer = said({"said": "a"}, "much")
        elif fault == "nan": answer = said({"said": "a"}, float("nan"))
        elif fault == "never": answer = said({"said": "on"}, 0.125)
        elif fault == "silent": answer = said({"said": "end"}, None, True)
        else: answer = said({"said": f"got {len(data.get('word', ''))}"}, 0.25 * steps, steps == 2)
        await socket.send("{" if fault == "json" else json.dumps(answer))

async def main():
    async with serve(session, "127.0.0.1", int(sys.argv[1]), process_request=http, max_size=None):
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""
PACKAGE = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class WordAction(Action):
    word: str

class WordObservation(Observation):
    said: str = ""

class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.steps = 0

    def reset(self, seed=None, episode_id=None, level=0, **named):
        self.steps = 0
        return WordObservation(said=f"begin {level}")

    def step(self, action, timeout_s=None, **named):
        self.steps += 1
        return WordObservation(said=f"got {len(action.word)}", reward=0.25 * self.steps, done=self.steps == 2)

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_fastapi_app(Words, WordAction, WordObservation, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextmanager
def served(python: str, code: str, folder: Path) -> Iterator[str]:
    port = free_port()
    (folder / "server.py").write_text(code)
    process = subprocess.Popen([python, str(folder / "server.py"), str(port)])

    def answers() -> bool:
        assert process.poll() is None, "the server has ended"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/schema", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, "the server")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(sys.executable, SERVER, tmp_path_factory.mktemp("server")) as url:
        yield url


class Caller(AtOnce):
    """In place of engines: calls the tool."""

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
        said = self._renderer.tokenizer(call, add_special_tokens=False).input_ids
        return SampledAnswer([*said, self._renderer.end_token_id], [-1.0] * (len(said) + 1), True)


class Cut(AtOnce):
    """In place of engines: the limit of tokens cuts each answer after the first `whole` ones."""

    whole = 0

    async def ask(
        self, engine: int, tokens: Sequence[int], seed: int, sampling: Sampling, pictures: Any = ()
    ) -> SampledAnswer:
        answer = await super().ask(engine, tokens, seed, sampling, pictures)
        if len(self.asked) <= self.whole:
            return answer
        return SampledAnswer(answer.tokens[:-1], answer.logprobs[:-1], False)


class CutSecond(Cut):
    whole = 1


Play = Callable[..., list[Episode]]


@pytest.fixture
def play(renderer: Renderer) -> Iterator[Play]:
    background = Background()
    made = list[Episodes]()

    def played(url: str, *rows: dict[str, Any], engines: Any = AtOnce, **options: Any) -> list[Episode]:
        config = Environment(openenv=url, options=options, timeout=60.0, max_attempts=1)
        made.append(Episodes(config, renderer, LIMITS, background, engines(renderer)))
        return run(made[-1], renderer, rows or [{}])

    yield played
    for episodes in made:
        episodes.close()
    background.close()


def said_in(episode: Episode) -> list[str]:
    return [message["content"] for message in episode.trajectory.messages]


def test_answers_are_actions_and_observations_messages(play: Play, server: str) -> None:
    (episode,) = play(server, {"reset": {"level": 3}})
    assert episode.rewards == [0.25, 0.5] and not episode.failure
    said = said_in(episode)
    assert said[:2] == ["Go", "begin 3"] and said[2] == "ok0"
    assert said[3] == "got 3" and said[4].startswith("ok") and len(said) == 5


def test_the_last_reward_alone(play: Play, server: str) -> None:
    (episode,) = play(server, reward="last")
    assert episode.rewards == [0.0, 0.5]


def test_an_environment_that_is_never_done_ends_with_the_turns(play: Play, server: str) -> None:
    (episode,) = play(server, {"reset": {"fault": "never"}})
    assert episode.rewards == [0.125] * 4 and not episode.failure
    (episode,) = play(server, {"reset": {"fault": "never"}}, reward="last")
    assert episode.rewards == [0.0, 0.0, 0.0, 0.125]


def test_a_cut_answer_ends_the_episode_with_its_rewards_so_far(play: Play, server: str) -> None:
    for url in (server, f"{server}/tools"):
        (episode,) = play(url, engines=Cut)
        assert episode.rewards == [0.0] and not episode.failure, episode.failure
    (episode,) = play(server, engines=CutSecond, reward="last")
    assert episode.rewards == [0.0, 0.25] and not episode.failure, episode.failure


def test_an_episode_with_tools_that_calls_none_has_the_reward_0(play: Play, server: str) -> None:
    (episode,) = play(f"{server}/tools")
    assert episode.rewards == [0.0] and not episode.failure, episode.failure


def test_an_action_of_another_form_is_told_to_the_model(play: Play, server: str) -> None:
    (episode,) = play(server, {"reset": {"fault": "refuse"}})
    assert said_in(episode)[3] == "error: planted" and episode.rewards == [0.0, 0.5]
    (episode,) = play(f"{server}/plain")  # no schema: the answer must hold a JSON object
    assert "holds no JSON object" in said_in(episode)[3] and episode.rewards == [0.0] * 4


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "failed in a step: planted (EXECUTION_ERROR)"),
        ("hang", "did not answer a step in 2 s"),
        ("close", "closed the session in a step"),
        ("huge", "sent a message of over 16777216 bytes"),
        ("json", "answered a step with no message of OpenEnv"),
        ("list", "answered a step with no message of OpenEnv"),
        ("half", "answered a step without an observation"),
        ("text", "answered a step without an observation, a reward that is a number or null"),
        ("nan", "answered a step without an observation, a reward that is a number"),
        ("silent", "gave no reward in 1 steps"),
    ],
)
def test_a_fault_of_the_server_is_a_failed_attempt(play: Play, server: str, fault: str, told: str) -> None:
    failed, fine = play(server, {"reset": {"fault": fault}}, {}, seconds=2.0)
    assert failed.rewards == [] and told in failed.failure, failed.failure
    assert failed.failure.count("\n") == 0
    assert fine.rewards == [0.25, 0.5], fine.failure


def test_calls_of_tools(play: Play, server: str) -> None:
    (episode,) = play(f"{server}/tools", engines=Caller)
    assert episode.rewards == [0.5, 0.5], episode.failure
    assert said_in(episode)[3] == "5"


def test_a_server_that_is_down_is_a_sentence(play: Play) -> None:
    with pytest.raises(ValueError, match=r"the OpenEnv server http://127.0.0.1:\d+ cannot be reached"):
        play(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="must be sum or last"):
        play("http://127.0.0.1:1", reward="mean")
    with pytest.raises(ValueError, match="the variable NO_TOKEN is empty"):
        play("http://127.0.0.1:1", token_env="NO_TOKEN")


def test_a_schema_that_trickles_ends_after_the_time_of_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_session, "OPEN_SECONDS", 2.0)
    done = threading.Event()

    def trickle(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not done.wait(0.05):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=trickle, args=(listening,))
        serving.start()
        stop = threading.Timer(20.0, done.set)  # what waits for the end of the schema gets one
        stop.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with pytest.raises(openenv_session.ServerFault, match=r"did not send its schema in 2 s"):
                openenv_session.OpenEnvServer(url, None, 1.0).action_schema()
        finally:
            done.set()
            stop.cancel()
            serving.join()


def test_the_wait_for_an_answer_has_no_limit_beside_seconds(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict[str, Any]()

    async def refusing(address: str, **options: Any) -> None:
        given.update(options)
        raise OSError("planted")

    async def opened() -> None:
        async with openenv_session.OpenEnvServer(server, None, 60.0).session():
            pass

    monkeypatch.setattr(openenv_session, "connect", refusing)
    with pytest.raises(openenv_session.ServerFault, match="opens no session: planted"):
        asyncio.run(opened())
    assert given["ping_timeout"] is None


@pytest.mark.skipif(
    not INTERPRETER, reason="set ALIGNFLOW_TEST_OPENENV to an interpreter that has openenv-core (0.3.0)"
)
def test_a_server_of_the_package(play: Play, tmp_path: Path) -> None:
    with served(INTERPRETER, PACKAGE, tmp_path) as url:
        first, second = play(url, {"reset": {"level": 3}}, {})
        assert first.rewards == [0.25, 0.5] and second.rewards == [0.25, 0.5], first.failure
        assert said_in(first)[1] == "begin 3" and said_in(first)[3] == "got 3"
        with pytest.raises(ValueError, match="have no field 'phrase'; their fields are word"):
            play(url, {}, field="phrase")


def test_actions_of_answers() -> None:
    number = {"properties": {"n": {"type": "integer"}, "metadata": {}}, "required": ["n"]}
    assert text_field(number) == "n" and text_field({}) is None
    assert text_field({"properties": {"a": {}, "b": {}}, "required": ["b"]}) == "b"
    assert text_field({"properties": {"a": {}, "b": {}}}) is None
    both = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    assert "have no field 'c'; their fields are a, b" in action_problem(both, "c", {})
    assert "need b too" in action_problem(both, "a", {}) and action_problem(both, "a", {"b": 1}) == ""
    assert action_problem(both, None, {}) == action_problem({}, "c", {"d": 1}) == ""
    assert action_of(" 3 ", "n", number, {"k": 1}) == {"k": 1, "n": 3}
    assert action_of(" a\n", "word", {}, {}) == {"word": "a"}
    with pytest.raises(ValueError, match="must be n alone, a JSON integer"):
        action_of("three", "n", number, {})
    assert action_of('so {x} {"a": {"b": 1}} {"c": 2}', None, {}, {"k": 1}) == {"k": 1, "a": {"b": 1}}
    for text in ("", "no", "{" * 1000, '{"a": NaN}', '{"a": ' * 100_000):
        with pytest.raises(ValueError, match="no JSON object"):
            first_object(text)


def test_texts_of_observations() -> None:
    assert text_of({"said": "a", "none": None, "list": []}, (), 10) == "a"
    assert text_of({"a": 1, "b": "x"}, (), 100) == '{"a": 1, "b": "x"}'
    assert text_of({"a": 1, "b": "x"}, ("b",), 100) == "x"
    assert text_of({}, (), 100) == "" and text_of({"a": 1}, ("b",), 10) == ""
    assert text_of({"said": "x" * 20}, (), 8) == "x" * 8 + "\n[12 more characters]"


def test_images_of_observations() -> None:
    url = "data:image/png;base64,AAAA"
    seen = {"screen": url, "said": "a" * 9, "other": 1}
    image = {"type": "image", "image": url}
    found = shown_to(True, seen, ("screen", "said"), 4)
    text = {"type": "text", "text": "aaaa\n[5 more characters]"}
    assert found == {"role": "user", "content": [image, text]}
    assert shown_to(True, seen, ("screen",), 4) == {"role": "user", "content": [image]}
    assert shown_to(True, seen, ("said",), 9) == "a" * 9 == shown_to(False, seen, ("said",), 9)
    assert shown_to(False, {"screen": url}, (), 99) == url
    assert openenv_session.LARGEST == 2**24
