"""Answers on which a source of rewards hangs or fails: they alone are lost, and a dead source gets few
requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rewards.clients import Client, RewardBackend
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import LISTS, Reply, RewardError, RewardsFailed, Sample, read_rewards
from tests.support.http_handler import JsonHandler, handled_by

COUNT = 256
TIMEOUT = 1.0
SAMPLES = [Sample([], str(i), {}, True, str(i)) for i in range(COUNT)]
FUNCTION = """
import time

def number(responses):
    if "{bad}" in responses:
        with open(__file__ + ".hung", "a") as file:
            file.write("x")
        time.sleep(60)
    return [float(response) for response in responses]
"""


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """Hangs on answer 77. Yields its address, and the sizes of the requests on which it hung."""

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            responses = self.question()["responses"]
            if "77" in responses:
                hung.append(len(responses))
                ended.wait(60)
                return
            self.reply(200, {"rewards": [float(response) for response in responses]})

    ended = threading.Event()
    hung: list[int] = []
    with handled_by(Handler) as address:
        yield address, hung
        ended.set()


def lost(source: RewardBackend, batch_size: int, allowed: int, attempts: int = 6) -> tuple[list[int], str]:
    """Which of the answers have no reward, and the last error."""
    rewards, error, _ = Client("source", source, batch_size, 1, attempts, pause=0).score(SAMPLES, allowed)
    there = ~np.isnan(rewards)
    assert rewards[there].tolist() == np.arange(COUNT)[there].tolist(), "each reward is its own answer's"
    return np.flatnonzero(~there).tolist(), error


@pytest.mark.parametrize("batch_size", [64, 256])
def test_an_answer_on_which_a_server_hangs_is_lost_alone(
    server: tuple[str, list[int]], batch_size: int
) -> None:
    address, hung = server
    found, error = lost(HttpRewardClient(address, TIMEOUT, None), batch_size, allowed=1)
    assert found == [77] and "within 1 s" in error
    assert len(hung) <= math.log2(batch_size) + 1, "no more time limits than a search needs"


def test_an_answer_on_which_a_function_hangs_is_lost_alone(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(FUNCTION.replace("{bad}", "200"))
    source = Function(tmp_path / "checks.py", "number", 3.0, processes=1)  # within which it is also imported
    try:
        found, error = lost(source, 256, allowed=1)
    finally:
        source.close()
    assert found == [200] and "within 3 s" in error
    hung = (tmp_path / "checks.py.hung").read_text()
    assert len(hung) <= math.log2(256) + 1, "its process is started anew each time"


class Refusing:
    """Fails when one of `bad` is requested. `requested` keeps the sizes of the requests; `failed` counts
    those without rewards."""

    wanted = LISTS

    def __init__(self, bad: Sequence[int]):
        self.bad = set(bad)
        self.requested = list[int]()
        self.failed = 0

    def score(self, samples: Sequence[Sample]) -> Reply:
        self.requested.append(len(samples))
        numbers = [int(sample.response) for sample in samples]
        if self.bad & set(numbers):
            self.failed += 1
            raise RewardError("it cannot score that")
        return Reply(np.array(numbers, dtype=np.float64), {})

    def close(self) -> None: ...


def lost_of(count: int, bad: Sequence[int], attempts: int) -> tuple[list[int], Refusing]:
    """Which of `count` answers in one batch have no reward when a source fails on `bad`."""
    source = Refusing(bad)
    rewards, *_ = Client("source", source, count, 1, attempts, pause=0).score(SAMPLES[:count], count)
    return np.flatnonzero(np.isnan(rewards)).tolist(), source


@pytest.mark.parametrize("attempts", [1, 2, 6])
@pytest.mark.parametrize(
    "bad",
    [
        [0],
        [63],
        [77],
        [255],
        [0, 255],
        [3, 100, 101],
        [63, 64, 127, 128],
        [0, 64, 128, 192],
        [10, 75, 140, 205],
        [0, 1, 2, 3],
    ],
)
def test_wherever_the_bad_answers_stand_they_alone_are_lost(bad: list[int], attempts: int) -> None:
    found, error = lost(Refusing(bad), 256, allowed=4, attempts=attempts)
    assert found == bad and error == "it cannot score that"


@given(
    st.integers(1, COUNT).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1))),
    st.integers(1, 8),
)
def test_one_bad_answer_costs_itself_and_few_time_limits(place: tuple[int, int], attempts: int) -> None:
    count, bad = place
    found, source = lost_of(count, [bad], attempts)
    assert found == [bad] and source.failed <= max(attempts, math.log2(count) + 1)


@given(st.sets(st.integers(0, COUNT - 1), max_size=4), st.integers(1, 8))
def test_up_to_four_bad_answers_of_a_batch_are_lost_alone(bad: set[int], attempts: int) -> None:
    found, source = lost_of(COUNT, sorted(bad), attempts)
    assert found == sorted(bad) and source.failed <= len(bad) * max(attempts, math.log2(COUNT) + 1)


def test_an_answer_without_a_reward_is_requested_max_attempts_times() -> None:
    class Null(Refusing):
        def score(self, samples: Sequence[Sample]) -> Reply:
            self.requested.append(len(samples))
            return Reply(
                np.array(
                    [np.nan if sample.response == "7" else float(sample.response) for sample in samples]
                ),
                {},
            )

    source = Null([])
    assert lost(source, COUNT, allowed=1, attempts=4)[0] == [7]
    assert source.requested == [COUNT, 1, 1, 1]


@pytest.mark.parametrize("attempts", [1, 2, 6])
def test_a_dead_source_gets_max_attempts_requests_beyond_those_of_a_search(attempts: int) -> None:
    source = Refusing(range(COUNT))
    with pytest.raises(RewardsFailed, match=r"left 256 of 256 .*the last error: it cannot score that"):
        lost(source, 256, allowed=5, attempts=attempts)
    assert len(source.requested) == attempts + math.log2(COUNT) + 1


def test_a_source_that_dies_at_work_is_given_up_too() -> None:
    class Dying(Refusing):
        def score(self, samples: Sequence[Sample]) -> Reply:
            if len(self.requested) == 3:
                self.bad = set(range(COUNT))
            return super().score(samples)

    source = Dying([0])
    found, _ = lost(source, 256, allowed=COUNT, attempts=2)
    assert len(found) == COUNT - 64, "the quarter that had rewards keeps them"
    assert len(source.requested) == 3 + 2 + math.log2(COUNT) + 1


def test_a_reply_of_a_wrong_length_is_not_made_to_fit_by_a_smaller_request() -> None:
    class Constant(Refusing):
        def score(self, samples: Sequence[Sample]) -> Reply:
            self.requested.append(len(samples))
            return read_rewards([0.0], len(samples))

    source = Constant([])
    found, error = lost(source, 256, allowed=COUNT)
    assert (
        found == list(range(COUNT))
        and error == "it gave 1 rewards for 256 answers"
        and source.requested == [256] * 6
    )
