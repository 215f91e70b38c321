"""The process of a reward function: only it answers, only the reply to a request counts, and its end is told
by status or signal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.rewards.clients import Client
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.reward_contract import RewardError, RewardsFailed, Sample
from rlhf_core.system.processes import raised_by_us

SAMPLES = [Sample([], str(i), {}, True, "") for i in range(32)]
CODE = """
import os, signal, stat, sys

calls = 0

def forks(responses):
    global calls
    calls += 1
    if calls == 1:
        os.fork()
    return [float(response) for response in responses]

def child_raises(responses):
    if os.fork() == 0:
        raise KeyError("in the child")
    return [float(response) for response in responses]

def child_leaves(responses):
    if os.fork() == 0:
        sys.exit(3)
    return [float(response) for response in responses]

def writes(responses):
    for number in range(3, 20):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, b'{"number": -1, "rewards": [9.0]}\\n')
        except OSError:
            pass
    return [1.0 for _ in responses]

def leaves(responses): sys.exit(3)
def breaks(responses): os.kill(os.getpid(), signal.SIGSEGV)
def closes(responses):
    os.closerange(0, 100)
    return [1.0 for _ in responses]

def misspelt(responses):
    return [scor(response) for response in responses]

def by_answer(responses):
    return {}[responses[0]]

def deep(responses):
    import helper
    return helper.number(responses)

def nothing(responses):
    return None

def first_right(responses):
    return [misspelt([response]) if int(response) > 7 else 1.0 for response in responses]

def network(responses):
    raise ConnectionError("no route")
"""
HELPER = """
import json

def number(responses):
    return [json.loads("{") for _ in responses]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("code") / "checks.py"
    written.write_text(CODE)
    (written.parent / "helper.py").write_text(HELPER)
    return written


@pytest.fixture
def started(file: Path, request: pytest.FixtureRequest) -> Iterator[Function]:
    function = Function(file, request.param, 10.0, processes=1)
    yield function
    function.close()


@pytest.mark.parametrize("started", ["forks", "child_raises", "child_leaves"], indirect=True)
def test_a_process_that_the_function_forks_answers_nothing(started: Function) -> None:
    rewards = Client("forks", started, 8, 1, 3, pause=0.01).score(SAMPLES, 0).rewards
    assert rewards.tolist() == list(range(32)), "each reward is its own answer's"


def test_a_process_forked_while_the_file_is_imported_answers_nothing(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(
        "import os\nos.fork()\ndef number(responses): return [float(r) for r in responses]\n"
    )
    function = Function(tmp_path / "checks.py", "number", 10.0, processes=1)
    try:
        assert [function.score(SAMPLES[i : i + 8]).rewards.tolist() for i in (0, 8)] == [
            list(range(8)),
            list(range(8, 16)),
        ]
    finally:
        function.close()


@pytest.mark.parametrize("started", ["writes"], indirect=True)
def test_a_line_with_another_number_is_not_taken_for_the_reply(started: Function) -> None:
    with pytest.raises(RewardError, match="not the reply to this request"):
        started.score(SAMPLES[:1])


@pytest.mark.parametrize(
    ("started", "told"),
    [
        ("leaves", "its process exited with status 3"),
        ("breaks", "its process was killed by SIGSEGV"),
        ("closes", "its process exited with status 1"),
    ],
    indirect=["started"],
)
def test_the_end_of_a_process_is_told_by_its_status_or_signal(started: Function, told: str) -> None:
    given = Client("ends", started, 8, 1, 1, pause=0).score(SAMPLES[:1], 1)
    assert np.isnan(given.rewards).all() and given.error == told


def line_of(code: str, text: str) -> int:
    return code.splitlines().index(text) + 1


@pytest.mark.parametrize(
    ("started", "told", "code", "line"),
    [
        (
            "misspelt",
            r"NameError: name 'scor' is not defined \(.*checks\.py",
            CODE,
            "    return [scor(response) for response in responses]",
        ),
        ("by_answer", r"KeyError: '\d+' \(.*checks\.py", CODE, "    return {}[responses[0]]"),
        (
            "deep",
            r"JSONDecodeError: .* \(.*helper\.py",
            HELPER,
            '    return [json.loads("{") for _ in responses]',
        ),
        (
            "nothing",
            r"TypeError: nothing\(\) returned None, no list of rewards \(.*checks\.py",
            CODE,
            "def nothing(responses):",
        ),
    ],
    indirect=["started"],
)
def test_an_error_of_the_code_in_every_request_stops_at_once_with_its_line(
    started: Function, told: str, code: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def uniform(low: float, high: float) -> float:
        pauses.append(high)
        return 0.0

    monkeypatch.setattr(random, "uniform", uniform)
    with pytest.raises(
        ValueError, match=rf"source f: each request raised {told}, line {line_of(code, line)}\); correct it"
    ) as caught:
        Client("f", started, 8, 1, 6).score(SAMPLES, 3)  # with the pauses of a run
    assert not pauses and raised_by_us(caught.value), "a user's mistake: the stage is not retried"


@pytest.mark.parametrize(
    ("started", "told"),
    [
        ("first_right", r"left 8 of 32 .*NameError: .*checks\.py, line \d+"),
        ("network", r"left 8 of 32 .*ConnectionError: no route"),
    ],
    indirect=["started"],
)
def test_an_error_that_some_requests_have_not_met_or_that_may_pass_is_a_failure_of_the_source(
    started: Function, told: str
) -> None:
    with pytest.raises(RewardsFailed, match=told):
        Client("f", started, 8, 1, 2, pause=0).score(SAMPLES, 3)


def test_an_error_while_the_file_is_imported_is_told_with_its_line(tmp_path: Path) -> None:
    for text, told in (("\nscor(1)\n", "NameError: .*"), ("\ndef score(:\n", "SyntaxError: invalid syntax ")):
        (tmp_path / "checks.py").write_text(text)
        with pytest.raises(
            ValueError, match=rf"checks\.py cannot be imported: {told}\(.*checks\.py, line 2\)"
        ):
            Function(tmp_path / "checks.py", "score", 10.0, processes=1).score(SAMPLES[:1])
