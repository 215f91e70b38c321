"""Rewards as a contract: sources that fail in every way are retried, then masked and counted; nothing becomes
0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config.rewards import HttpReward
from rlhf_core.rewards.clients import Client, client_of
from rlhf_core.rewards.remote import HttpRewardClient
from rlhf_core.rewards.reward_contract import (
    LARGEST,
    RewardError,
    RewardsFailed,
    read_reply,
    read_rewards,
)
from tests.support.http_handler import JsonHandler, handled_by
from tests.support.reward_server import SAMPLES, Reply, Served, lengths


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
def test_a_server_that_hangs_is_left_after_the_time_limit(drips: bool) -> None:
    """Also one that sends a byte now and then: the limit is on the whole request."""

    class Hang(JsonHandler):
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

    start = time.monotonic()
    with handled_by(Hang) as address:
        rewards, error = score(address, timeout=0.3, attempts=2)
        assert np.isnan(rewards).all() and "within 0.3 s" in error
        assert time.monotonic() - start < 25


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
    with pytest.raises(ValueError, match="contains a password") as refused:
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


def test_a_large_reward_is_bounded(served: Served) -> None:
    served.behave[0] = lambda number, question: (200, b'{"rewards": [1e308, -1e308, 1e31, 1e30, 1, 0]}')
    rewards, error = score(served.url, allowed=0)
    assert rewards.tolist() == [1e30, -1e30, 1e30, 1e30, 1, 0] and error == ""
