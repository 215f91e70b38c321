"""A judge behind an OpenAI-compatible endpoint, played by an HTTP server here: what it is asked, when, how
often, and what is counted."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.chat_judge import CachedVerdict
from evaluation.judges.judge_prompt import judge_prompt
from evaluation.judges.offline import Match
from rlhf_core.judging.chat_client import Connection, Pace
from rlhf_core.judging.record_lines import records_of
from rlhf_core.records import POINTS
from tests.support.chat_endpoint import SECRET, Reply, completion, error, serving
from tests.support.judging import matches, openai_judge, question, scores

pytestmark = pytest.mark.usefixtures("judge_key")


def test_an_endpoint_is_asked_as_configured_and_its_verdicts_come_back_in_order(tmp_path: Path) -> None:
    def script(_: int, request: dict[str, Any]) -> Reply:
        number = int(request["messages"][1]["content"].split("Question ")[1].split("?")[0])
        time.sleep(0.02 * (3 - number % 3))  # later questions are answered first
        return completion(f"[[{list(POINTS)[number % 5]}]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, concurrency=3)
        games = judge.judge(matches(10))
    assert scores(games) == list(POINTS) * 2
    assert endpoint.most_busy <= 3
    assert {(r["model"], r["temperature"], r["max_tokens"]) for r in endpoint.requests} == {("judge", 0, 64)}
    assert set(endpoint.keys) == {f"Bearer {SECRET}"}
    assert judge.tokens == (100, 30)
    assert games[0].prompt == judge_prompt(matches(1)[0])


def test_a_reply_without_verdict_is_asked_for_one_once(tmp_path: Path) -> None:
    with serving(
        lambda number, _: completion("Both are fine." if number == 0 else "then [[a=b]]")
    ) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path)
        (game,) = judge.judge(matches(1))
    assert game.score == "A=B" and game.judgment == {"answer": "Both are fine.\nthen [[a=b]]"}
    assert [message["role"] for message in endpoint.requests[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert judge.tokens[0] == 20


def test_the_key_reaches_no_file(tmp_path: Path, capfd: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving(lambda number, _: error(500) if number % 2 else completion("[[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path, max_failed=1.0).judge(matches(4))
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert written and SECRET not in "".join(written) + caplog.text + "".join(capfd.readouterr())


def test_nothing_is_asked_twice_even_after_a_kill(tmp_path: Path) -> None:
    cache = tmp_path / "cache.jsonl"
    with serving(lambda *_: completion("裁定 [[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge(matches(4))
        written = cache.read_bytes()
        # the process died within a character of the last line
        cache.write_bytes(written[: written.rindex("定".encode()) + 1])
        assert len(list(records_of(cache, CachedVerdict))) == 3
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(4))) == ["A>B"] * 4
        assert len(endpoint.requests) == 5
        again = openai_judge(endpoint.url, tmp_path)
        assert scores(again.judge(matches(4))) == ["A>B"] * 4
        assert len(endpoint.requests) == 5 and again.tokens[0] == 40
    assert len(list(records_of(cache, CachedVerdict))) == 4


def test_the_same_game_of_two_models_is_asked_once_and_swapped_games_twice(tmp_path: Path) -> None:
    one = Match(question(), "x", "y")
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge([one, one, Match(question(), "y", "x")])
    assert len(endpoint.requests) == 2


def test_a_verdict_is_used_again_only_for_the_same_request(tmp_path: Path) -> None:
    sums, creative = (
        [Match(question(category=category), "x", "y")] for category in ("sums", "creative_writing")
    )
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:
        # another system prompt, another max_tokens
        for length, match in ((64, sums), (64, creative), (65, sums), (64, sums)):
            openai_judge(endpoint.url, tmp_path, max_tokens=length).judge(match)
    assert len(endpoint.requests) == 3


def test_concurrency_hides_the_latency_of_the_endpoint(tmp_path: Path) -> None:
    """The endpoint answers nobody until it has 16 requests."""
    deadline = time.monotonic() + 100

    def script(*_: object) -> Reply:
        while endpoint.most_busy < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        return completion("[[A=B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, concurrency=16, timeout=200.0)
        assert scores(judge.judge(matches(64))) == ["A=B"] * 64
    assert endpoint.most_busy == 16


def test_requests_are_spaced_as_the_limit_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    turn = Pace.turn

    async def slow_at_first(pace: Pace) -> None:
        await turn(pace)
        times.append(pace.free - pace.gap)  # the moment of the turn, however late this line comes
        if len(times) == 1:
            # nothing of this process moves: those whose turn comes meanwhile do not go all at once
            time.sleep(0.5)

    monkeypatch.setattr(Pace, "turn", slow_at_first)
    with serving(lambda *_: completion("[[A=B]]")) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, concurrency=16, requests_per_minute=600)
        judge.judge(matches(6))
        judge.judge(matches(8))  # two more: the pace goes on
    assert judge.client.requests == len(endpoint.requests) == len(times) == 8
    # 600 a minute: one every 0.1 s
    assert all(later - earlier > 0.09 for earlier, later in pairwise(times)), times


def test_tokens_of_all_verdicts_are_counted_also_of_failed_ones(tmp_path: Path) -> None:
    def script(_: int, request: dict[str, Any]) -> Reply:
        return completion("nothing" if "Question 0?" in request["messages"][1]["content"] else "[[A>B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=1.0)
        judge.judge(matches(2))
        judge.judge(matches(3))
    assert (judge.games, judge.failed, judge.client.requests) == (5, 2, 2 + 1 + 2 + 1)
    assert judge.tokens == (10 * (2 + 1 + 1), 3 * (2 + 1 + 1))


def test_nothing_to_ask_connects_to_nobody(tmp_path: Path) -> None:
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge(matches(2))
    judge = openai_judge("http://nowhere/v1", tmp_path)

    def connect() -> Connection:
        raise AssertionError("a server would have been started")

    judge.client.connect = connect
    assert scores(judge.judge(matches(2))) == ["A>B"] * 2
    judge.identity = "other weights"
    # the same name with other weights: nothing of it is known
    with pytest.raises(AssertionError, match="started"):
        judge.judge(matches(2))
