"""Rewards as a contract: sources that fail in every way are retried, then masked and counted; nothing becomes
0."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.rewards import FunctionReward, HttpReward
from rlhf_core.rewards.clients import Client, Clients, client_of
from rlhf_core.rewards.functions.function import Function, wanted_by
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import (
    LARGEST,
    LISTS,
    RewardError,
    RewardsFailed,
    Sample,
    read_reply,
    read_rewards,
)
from tests.support.micro import wait_until

SAMPLES = [
    Sample(
        [{"role": "user", "content": f"say {i}"}], "x" * i, {"answer": str(i)}, True, f"<say {i}>{'x' * i}"
    )
    for i in range(1, 7)
]
Reply = tuple[int, Any]  # status; a body, a dict as JSON, or seconds to stay silent


def lengths(question: dict[str, Any]) -> Reply:
    """What a server that works says: each answer's length."""
    return 200, {"rewards": [len(response) for response in question["responses"]]}


class Served(NamedTuple):
    """A local server; `behave` maps (number of the request, question) to a reply, `requests` keeps the
    questions and their headers."""

    url: str
    requests: list[tuple[dict[str, Any], dict[str, str]]]
    behave: list[Callable[[int, dict[str, Any]], Reply]]


@pytest.fixture
def served() -> Iterator[Served]:
    state = Served("", [], [lambda number, question: lengths(question)])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append((question, {name.lower(): value for name, value in self.headers.items()}))
            status, body = state.behave[0](len(state.requests), question)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state._replace(url=f"http://127.0.0.1:{server.server_address[1]}/score")
    server.shutdown()
    server.server_close()


def score(
    url: str, allowed: int = 6, batch_size: int = 64, timeout: float = 60.0, attempts: int = 3
) -> tuple[np.ndarray, str]:
    return Client("server", HttpRewardClient(url, timeout, None), batch_size, 1, attempts, pause=0.01).score(
        SAMPLES, allowed
    )[:2]


def test_a_server_gets_the_contract_and_its_rewards_keep_their_order(served: Served) -> None:
    rewards, error = score(served.url, batch_size=4)
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6] and error == ""
    assert [len(question["prompts"]) for question, _ in served.requests] == [4, 2]
    first = {name: values[0] for name, values in served.requests[0][0].items()}
    assert first == {
        "prompts": [{"role": "user", "content": "say 1"}],
        "responses": "x",
        "rows": {"answer": "1"},
        "finished": True,
        "query": "<say 1>x",
    }


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Reply], str]] = {
    "500": (lambda q: (500, {"rewards": [0.0] * 6}), "answers 500"),
    "429": (lambda q: (429, {"rewards": [0.0] * 6}), "answers 429"),
    "garbage": (lambda q: (200, b"\xff<html>oops"), "is not JSON"),
    "empty": (lambda q: (200, b""), "is not JSON"),
    "no rewards": (lambda q: (200, {"error": "busy"}), 'no "rewards"'),
    "a list": (lambda q: (200, [1.0] * 6), 'no "rewards"'),
    "one number": (lambda q: (200, {"rewards": 0}), "no list but int"),
    "too few": (lambda q: (200, {"rewards": [0.0] * 5}), "5 rewards for 6 answers"),
    "too many": (lambda q: (200, {"rewards": [0.0] * 7}), "7 rewards for 6 answers"),
    "nan": (lambda q: (200, b'{"rewards": [NaN, NaN, NaN, NaN, NaN, NaN]}'), "null, nan or no number"),
    "infinity": (
        lambda q: (200, b'{"rewards": [Infinity, -Infinity, 1e999, NaN, null, null]}'),
        "null, nan or no number",
    ),
    "null": (lambda q: (200, {"rewards": [None] * len(q["prompts"])}), "null, nan or no number"),
    "text": (lambda q: (200, {"rewards": ["0"] * len(q["prompts"])}), "null, nan or no number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_retried_then_its_answers_have_no_reward(served: Served, fault: str) -> None:
    behave, expected = FAULTS[fault]
    served.behave[0] = lambda number, question: behave(question)
    rewards, error = score(served.url, allowed=6, attempts=3)
    assert np.isnan(rewards).all(), "a failed reward must not become a number"
    assert len(served.requests) == (6 if fault in ("500", "429") else 3), (
        "three more where one answer is searched for"
    )
    assert expected in error
    with pytest.raises(
        RewardsFailed, match=r"reward source server left 6 of 6 answers without a reward, more than the 5"
    ):
        score(served.url, allowed=5, attempts=1)


def test_a_server_that_is_down() -> None:
    rewards, error = score("http://127.0.0.1:9/", attempts=2)
    assert np.isnan(rewards).all() and "ConnectError" in error


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_is_left_after_the_time_limit(served: Served, drips: bool) -> None:
    """Also one that sends a byte now and then: the limit is on the whole request."""

    class Hang(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            try:
                for _ in range(300):
                    time.sleep(0.1)
                    if drips:
                        self.wfile.write(b" ")
            except OSError:
                return

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hang)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    start = time.monotonic()
    rewards, error = score(f"http://127.0.0.1:{server.server_address[1]}", timeout=0.3, attempts=2)
    assert np.isnan(rewards).all() and "within 0.3 s" in error
    assert time.monotonic() - start < 25
    server.shutdown()
    server.server_close()


def test_a_server_that_recovers_costs_nothing(served: Served) -> None:
    served.behave[0] = lambda number, question: (503, {}) if number < 3 else lengths(question)
    rewards, error = score(served.url, allowed=0, attempts=3)
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6] and error == ""


def test_only_answers_without_a_reward_are_requested_again(served: Served) -> None:
    served.behave[0] = lambda number, q: (
        200,
        {"rewards": [None if number == 1 and len(r) in (2, 5) else len(r) for r in q["responses"]]},
    )
    rewards, _ = score(served.url)
    assert rewards.tolist() == [1, 2, 3, 4, 5, 6]
    assert [len(response) for response in served.requests[1][0]["responses"]] == [2, 5]


def test_a_part_that_stays_without_reward_is_masked_and_the_rest_kept(served: Served) -> None:
    served.behave[0] = lambda number, q: (500, {}) if "xxx" in q["responses"] else lengths(q)
    rewards, error = score(served.url, batch_size=1, attempts=2)
    assert np.isnan(rewards).tolist() == [False, False, True, False, False, False]
    assert rewards[~np.isnan(rewards)].tolist() == [1, 2, 4, 5, 6] and "answers 500" in error


def test_beyond_the_limit_no_more_requests_are_sent(served: Served) -> None:
    served.behave[0] = lambda number, question: (500, {})
    with pytest.raises(RewardsFailed, match="server") as caught:
        score(served.url, allowed=1, batch_size=1, attempts=1)
    assert "answers 500" in str(caught.value) and "max_failed_rewards" in str(caught.value)
    assert len(served.requests) <= 4  # two that failed, and what was in flight


def test_a_refusal_stops_at_once(served: Served) -> None:
    served.behave[0] = lambda number, question: (404, {})
    with pytest.raises(ValueError, match="answers 404: check its address"):
        score(served.url)
    assert len(served.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_key_is_told_where_to_name_it(served: Served, status: int) -> None:
    served.behave[0] = lambda number, question: (status, {})
    with pytest.raises(ValueError, match=f"answers {status}: set api_key_env to the name of the environment"):
        score(served.url)


def test_secrets_are_sent_and_never_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds a password") as refused:
        HttpReward(url=served.url.replace("http://", "http://user:hunter2@"))
    source = HttpReward(url=f"{served.url}?token=hunter2", api_key_env="REWARD_KEY", max_attempts=1)
    with pytest.raises(ValueError, match="environment variable REWARD_KEY: set it"):
        client_of(source)
    monkeypatch.setenv("REWARD_KEY", "hunter3")
    assert source.title == served.url.removeprefix("http://").removesuffix("/score")
    served.behave[0] = lambda number, question: (500, {})
    error = client_of(source).score(SAMPLES[:1], 6).error
    served.behave[0] = lambda number, question: (401, {})
    with pytest.raises(ValueError, match="the key in the environment variable REWARD_KEY") as refused:
        client_of(source).score(SAMPLES, 6)
    assert served.requests[0][1]["authorization"] == "Bearer hunter3"
    assert "hunter" not in error + str(refused.value) + source.title


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3),
    )
)
def test_whatever_a_reply_holds_only_numbers_are_rewards(value: Any) -> None:
    text = json.dumps({"rewards": [value, 2.5]})
    rewards = read_reply(text, 2).rewards
    if value == []:
        assert rewards[0] == 0, "an answer without steps"
        return
    is_number = isinstance(value, bool | float) and np.isfinite(value)
    assert rewards[1] == 2.5
    assert rewards[0] == min(max(value, -LARGEST), LARGEST) if is_number else np.isnan(rewards[0])


def test_rewards_of_the_wrong_kind_or_length() -> None:
    for wrong in (None, 3, "12", {"0": 1}):
        with pytest.raises(RewardError, match="no list"):
            read_rewards(wrong, 2)
    with pytest.raises(RewardError, match="1 rewards for 2"):
        read_rewards([1], 2)
    assert np.isnan(read_rewards([10**400], 1).rewards).all()


def test_a_large_reward_of_a_server_or_function_is_bounded(served: Served, tmp_path: Path) -> None:
    served.behave[0] = lambda number, question: (200, b'{"rewards": [1e308, -1e308, 1e31, 1e30, 1, 0]}')
    expected = [1e30, -1e30, 1e30, 1e30, 1.0, 0.0]
    rewards, error = score(served.url, allowed=0)
    assert rewards.tolist() == expected and error == ""
    (tmp_path / "checks.py").write_text("def large(responses): return [1e308, -1e308, 1e31, 1e30, 1, 0]\n")
    assert call(tmp_path / "checks.py", "large", allowed=0)[0].tolist() == expected


# Functions.


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("def score(responses, rows, extra=1): ...", {"responses", "rows"}),
        ("def score(*, query): ...", {"query"}),
        ("def score(**lists): ...", LISTS),
        ("@cached\ndef score(responses): ...", LISTS),
        ("from other import score", LISTS),
        ("if True:\n    def score(responses): ...", LISTS),
        ("def score(", LISTS),
        ("def score(responses): ...\nscore = logged(score)", LISTS),
        ("def score(responses): ...\ntry:\n    from fast import score\nexcept ImportError: ...", LISTS),
    ],
)
def test_only_lists_that_a_function_names_are_made(code: str, wanted: set[str], tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(code)
    assert wanted_by(tmp_path / "checks.py", "score") == wanted


CODE = """
import os, sys, time
from helper import length

print("noise at import")

def good(responses, rows):
    print("noise")
    sys.stdout.write("[1, 2, 3]\\n")
    assert [row["answer"] for row in rows] == [str(length(r)) for r in responses]
    return [length(r) for r in responses]

def everything(**lists):
    return [len(lists)] * len(lists["query"])

def stepwise(responses):
    import numpy
    return [((numpy.int64(1), numpy.float32(1)), [9, 2.0]) for _ in responses]

def raises(responses): raise KeyError("no such thing")
def short(responses): return [0.0]
def nothing(responses): return None
def nans(responses): return [float("nan"), None, "0", float("inf"), [0], 2]
def hangs(responses): time.sleep(60)
def marks(responses):
    with open(os.path.join(os.path.dirname(__file__), "hung.part"), "w") as file:
        file.write(str(os.getpid()))
    os.replace(file.name, file.name.removesuffix(".part"))
    time.sleep(60)
def dies(responses): os._exit(1)
def dies_once(responses):
    if not os.path.exists(__file__ + ".mark"):
        open(__file__ + ".mark", "w").close()
        os._exit(1)
    return [1.0] * len(responses)
def greedy(responses, scores): return responses
constant = 3
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "helper.py").write_text("def length(text): return len(text)\n")
    (folder / "checks.py").write_text(CODE)
    return folder / "checks.py"


def call(
    code: Path, name: str, timeout: float = 60.0, attempts: int = 2, allowed: int = 6
) -> tuple[np.ndarray, str]:
    source = Function(code, name, timeout, processes=1)
    try:
        return Client(name, source, 64, 1, attempts, pause=0.01).score(SAMPLES, allowed)[:2]
    finally:
        source.close()


def test_a_function_gets_what_it_names_and_may_print(code: Path) -> None:
    assert call(code, "good")[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert call(code, "everything")[0].tolist() == [5] * 6
    assert call(code, "stepwise")[0].tolist() == [3] * 6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("short", "1 rewards for 6 answers"),
        ("dies", "its process exited with status 1"),
        ("hangs", "no answer within 1 s"),
    ],
)
def test_a_function_that_fails_leaves_its_answers_without_a_reward(
    code: Path, name: str, expected: str
) -> None:
    start = time.monotonic()
    rewards, error = call(code, name, timeout=1.0 if name == "hangs" else 60.0, attempts=2)
    assert np.isnan(rewards).all() and expected in error
    assert time.monotonic() - start < 50
    with pytest.raises(RewardsFailed, match=f"reward source {name} left 6 of 6"):
        call(code, name, timeout=1.0 if name == "hangs" else 60.0, attempts=1, allowed=0)


def test_what_is_no_number_is_no_reward_of_a_function(code: Path) -> None:
    rewards, _ = call(code, "nans", attempts=1)
    assert rewards[5] == 2 and np.isnan(rewards[:5]).all()


def test_a_process_that_died_is_started_again(code: Path) -> None:
    assert call(code, "dies_once", allowed=0)[0].tolist() == [1] * 6


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("checks.py", "goood", "has no function 'goood'"),
        ("checks.py", "constant", "has no function 'constant'"),
        ("checks.py", "greedy", "greedy needs scores"),
        ("none.py", "good", "there is no Python file"),
        ("broken.py", "good", "cannot be imported: SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_users_mistake(
    code: Path, file: str, name: str, expected: str
) -> None:
    (code.parent / "broken.py").write_text("def good(:\n")
    with pytest.raises(ValueError, match=expected):
        call(code.parent / file, name)


def test_sources_work_side_by_side(code: Path, served: Served) -> None:
    clients = Clients(
        [
            client_of(FunctionReward(function=f"{code}:good")),
            client_of(HttpReward(url=served.url, name="server")),
        ]
    )
    futures = clients.start(SAMPLES, 0)
    found = {title: future.result()[0].tolist() for title, future in futures.items()}
    assert found == {"good": [1, 2, 3, 4, 5, 6], "server": [1, 2, 3, 4, 5, 6]}
    clients.close()


@pytest.mark.parametrize("kind", ["function", "server"])
def test_close_waits_for_no_open_request(kind: str, code: Path, served: Served) -> None:
    """Neither for its time limit nor for further attempts nor for the batches behind it."""
    silent = threading.Event()
    begun = threading.Event()

    def behave(number: int, question: dict[str, Any]) -> Reply:
        begun.set()
        silent.wait(60)
        return lengths(question)

    served.behave[0] = behave
    mark = code.parent / "hung"
    mark.unlink(missing_ok=True)
    source = (
        FunctionReward(function=f"{code}:marks", batch_size=2)
        if kind == "function"
        else HttpReward(url=served.url, name="server", batch_size=2)
    )
    clients = Clients([client_of(source)])
    try:
        (future,) = clients.start(SAMPLES, 6).values()
        wait_until(mark.exists if kind == "function" else begun.is_set, "the first question")
        start = time.monotonic()
        clients.close()
        assert time.monotonic() - start < 50
        rewards, error, _ = future.result(timeout=0)
        assert np.isnan(rewards).all() and "gets no more requests" in error
        if kind == "function":
            assert not psutil.pid_exists(int(mark.read_text()))
        else:
            assert len(served.requests) == 1
        late = (
            Function(code, "good", 10.0, processes=1)
            if kind == "function"
            else HttpRewardClient(served.url, 10.0, None)
        )
        late.close()
        # a thread that was about to send a request
        with pytest.raises(RewardError, match="gets no more requests"):
            late.score(SAMPLES)
        assert len(served.requests) <= 1
    finally:
        silent.set()
