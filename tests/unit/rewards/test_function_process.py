"""The process of a reward function: only it answers, only the reply to a request counts, and its end is told by status or signal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.rewards.clients import Client
from rlhf_core.rewards.contract import RewardError, Sample
from rlhf_core.rewards.function import Function

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
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("code") / "checks.py"
    written.write_text(CODE)
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
    (tmp_path / "checks.py").write_text("import os\nos.fork()\ndef number(responses): return [float(r) for r in responses]\n")
    function = Function(tmp_path / "checks.py", "number", 10.0, processes=1)
    try:
        assert [function.score(SAMPLES[i : i + 8]).rewards.tolist() for i in (0, 8)] == [list(range(8)), list(range(8, 16))]
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
