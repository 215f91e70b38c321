"""Functions as sources of rewards: what they get, how they fail and end, and that sources work side by side."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhf_core.config.rewards import FunctionReward, HttpReward
from rlhf_core.rewards.clients import Client, Clients, client_of
from rlhf_core.rewards.functions.function import Function, wanted_by
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import (
    LISTS,
    RewardError,
    RewardsFailed,
)
from tests.support.micro import wait_until
from tests.support.reward_server import SAMPLES, Reply, Served, lengths


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
def large(responses): return [1e308, -1e308, 1e31, 1e30, 1, 0]
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


def test_a_large_reward_is_bounded(code: Path) -> None:
    assert call(code, "large", allowed=0)[0].tolist() == [1e30, -1e30, 1e30, 1e30, 1, 0]


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
