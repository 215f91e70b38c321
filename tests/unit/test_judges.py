"""Judges: the rule, a reward model's scores, and an OpenAI-compatible endpoint played by a small HTTP server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.chat_client import ChatClient, Connection, remote
from evaluation.judge import Match, RewardJudge, RuleJudge, battles
from evaluation.judge_prompt import judge_prompt, parse_verdict
from evaluation.openai_judge import OpenAIJudge, read_cache
from evaluation.questions import Question
from evaluation.scoring import win_rate
from rlhf_core.data.documents import Document
from rlhf_core.rollout.server import ServerFailed
from rlhf_core.types import POINTS, Game
from tests.chat_endpoint import SECRET, Reply, completion, error, serving


def question(uid: str = "q1", prompt: str = "What is 2 + 2?", category: str = "sums", **row: Any) -> Question:
    return Question(uid, category, ({"role": "user", "content": prompt},), row)


# --- verdicts ---


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("My final verdict is: [[A>B]]", "A>B"),
        ("my verdict: [[b>>a]].", "B>>A"),
        ("[[A=B]]", "A=B"),
        ("First I thought [[A>>B]], but it is [[B>A]]", "B>A"),
        ("single brackets: [A>B]", "A>B"),
        ("[[A>B]] beats a later single [B>A]", "A>B"),
        ("mirrored: [[B<<A]]", "A>>B"),
        ("mirrored: [[A<B]]", "B>A"),
        ("[[B=A]]", "A=B"),
        ("裁定如下 [[B>A]] 。", "B>A"),
        ("[A]", None),
        ("[[A]]", None),
        ("A>>>B", None),
        ("[[A>>>B]]", None),
        ("[[A>B]] no, rather [[A>>>B]]", "A>B"),
        ("[[A==B]]", None),
        ("A>B without brackets", None),
        ("[[C>A]] [[A > B]]", None),
        ("", None),
    ],
)
def test_verdicts_are_read_from_a_whitelist(text: str, verdict: str | None) -> None:
    assert parse_verdict(text) == verdict


@given(st.text(alphabet="ABab<>=[] C\n", max_size=40))
def test_no_text_gives_a_label_outside_the_five(text: str) -> None:
    assert parse_verdict(text) in (None, *POINTS)


def test_the_judge_answers_hard_prompts_itself_and_creative_ones_not() -> None:
    hard, creative = (judge_prompt(Match(question(category=c), "four", "five")) for c in ("hard_prompt", "creative_writing"))
    assert "write your own answer" in hard[0]["content"] and "write your own answer" not in creative[0]["content"]
    said = hard[1]["content"]
    assert said.index("What is 2 + 2?") < said.index("four") < said.index("five")
    assert judge_prompt(Match(question(), "five", "four"))[1]["content"] != said


# --- offline judges ---


def test_the_rule_prefers_the_known_answer_and_sees_no_whitespace() -> None:
    judge = RuleJudge("rule", "answer")
    asked = question(answer="a b")
    games = judge.judge([Match(asked, a, b) for a, b in [(" a\n b ", "b a"), ("ab", "a b"), ("a b", "a  b"), ("x", ""), ("A B", "a b.")]])
    assert [game.score for game in games] == ["A>B", "B>A", "A=B", "A=B", "A=B"]


def test_the_rule_says_which_question_has_no_known_answer() -> None:
    with pytest.raises(ValueError, match="question q1 has no 'solution'"):
        RuleJudge("rule", "solution").judge([Match(question(answer="4"), "4", "5")])
    assert RuleJudge("rule", "answer").right(question(answer=4), "4")


class Characters:
    """A renderer whose tokens are characters: enough to see what a reward judge scores."""

    def prompt_within(self, messages: Sequence[dict[str, str]], limit: int) -> tuple[list[int], bool]:
        tokens = [ord(character) for character in messages[-1]["content"]]
        return tokens[-limit:], len(tokens) > limit

    def answer_tokens(self, prompt: list[int], response: str) -> Document:
        said = [*map(ord, response), 0]
        return Document(prompt + said, [False] * len(prompt) + [True] * len(said))


def reward_judge(tie: float = 0.0, answer_max_len: int = 100) -> tuple[RewardJudge, list[list[Document]]]:
    """A judge that likes long answers, and the batches it scored."""
    seen: list[list[Document]] = []

    def score(documents: list[Document]) -> list[float]:
        seen.append(documents)
        return [float(sum(document.mask)) for document in documents]

    return RewardJudge("reward_model", score, Characters(), tie, 5, answer_max_len), seen  # type: ignore[arg-type]


def test_the_higher_reward_wins_and_a_small_difference_ties() -> None:
    matches = [Match(question(), a, b) for a, b in [("long answer", "short"), ("a", "bb"), ("xx", "yy")]]
    assert [game.score for game in reward_judge()[0].judge(matches)] == ["A>B", "B>A", "A=B"]
    assert [game.score for game in reward_judge(tie=1.0)[0].judge(matches)] == ["A>B", "A=B", "A=B"]


def test_a_reward_judge_scores_each_answer_once_within_the_limits() -> None:
    judge, seen = reward_judge(answer_max_len=4)
    judge.judge([Match(question(), "too long", "abc"), Match(question(), "abc", "too long")])
    (documents,) = seen
    texts = ["".join(map(chr, document.tokens)) for document in documents]
    assert texts == ["+ 2?"[-5:].rjust(5) + "too ", " + 2?abc\0"]  # the cut answer has no end-of-turn token, the whole one has


class Scripted:
    """A judge that prefers the longer answer, or whoever is shown first."""

    name = "scripted"

    def __init__(self, first_wins: bool = False):
        self.first_wins = first_wins
        self.matches: list[Match] = []

    def judge(self, matches: Sequence[Match]) -> list[Game]:
        self.matches += matches
        return [
            Game(score="A>B" if self.first_wins or len(m.answer_a) > len(m.answer_b) else "B>A", judgment={"answer": ""}) for m in matches
        ]


def test_both_orders_of_every_battle_are_put_to_the_judge() -> None:
    questions = [question("1"), question("2")]
    judge = Scripted()
    judged = battles(
        judge, questions, {"sft": ["s1", "s2"], "dpo": ["longer1", "l"], "ppo": ["longest1", "longest2"]}, [("dpo", "sft"), ("ppo", "sft")]
    )
    assert [(m.question.uid, m.answer_a, m.answer_b) for m in judge.matches[:4]] == [
        ("1", "s1", "longer1"), ("1", "longer1", "s1"), ("2", "s2", "l"), ("2", "l", "s2"),
    ]  # fmt: skip
    assert [(j.model, j.uid, j.score) for j in judged] == [("dpo", "1", 1.0), ("dpo", "2", 0.0), ("ppo", "1", 1.0), ("ppo", "2", 1.0)]
    assert all(judgment.scores[0] == judgment.scores[1] for judgment in judged)


def test_a_judge_that_looks_at_the_order_alone_gives_one_half() -> None:
    questions = [question(str(number)) for number in range(5)]
    judged = battles(Scripted(first_wins=True), questions, {"sft": ["a"] * 5, "ppo": ["bb"] * 5}, [("ppo", "sft")])
    rate = win_rate(judged, 50, 0)
    assert (rate.win_rate, rate.swap_consistency) == (0.5, 0.0)


# --- an endpoint ---


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def openai_judge(url: str, folder: Path, **changes: Any) -> OpenAIJudge:
    settings: dict[str, Any] = {
        "max_tokens": 64, "concurrency": 4, "max_failed": 0.0, "timeout": 5.0, "max_attempts": 4, "pause": 0.01, "api_key_env": "JUDGE_KEY",
    }  # fmt: skip
    settings |= changes
    limits = {"max_tokens": settings.pop("max_tokens"), "temperature": 0}
    max_failed, key = settings.pop("max_failed"), settings.pop("api_key_env")
    client = ChatClient("judge judge", "judge", lambda: remote(url, key), limits, **settings)
    return OpenAIJudge("judge", client, folder / "cache.jsonl", identity="judge", max_failed=max_failed)


def matches(count: int) -> list[Match]:
    return [Match(question(f"q{n}", f"Question {n}?"), f"first {n}", f"second {n}") for n in range(count)]


def scores(games: Sequence[Game]) -> list[str | None]:
    return [game.score for game in games]


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
    assert (judge.input_tokens, judge.output_tokens) == (100, 30)
    assert games[0].prompt == judge_prompt(matches(1)[0])


@pytest.mark.parametrize(
    "trouble",
    [
        error(429),
        error(429, **{"retry-after": "0.05"}),
        error(429, **{"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}),
        error(500),
        error(503),
        (200, {"content-type": "application/json"}, b'{"choices": [{"mess'),
        (200, {"content-type": "text/html"}, b"<html>not for you</html>"),
        (200, {"content-type": "application/json"}, b'{"choices": []}'),
        (200, {"content-type": "application/json", "content-length": "1000"}, b'{"choices'),
    ],
    ids=["429", "429 with seconds", "429 with a date", "500", "503", "half JSON", "a page", "no choice", "half a body"],
)
def test_a_troubled_endpoint_is_asked_again(trouble: Reply, tmp_path: Path) -> None:
    with serving(lambda number, _: trouble if number < 2 else completion("[[A>B]]")) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(1))) == ["A>B"]
    assert len(endpoint.requests) == 3


def test_the_endpoints_own_pause_is_respected(tmp_path: Path) -> None:
    start = time.monotonic()
    with serving(lambda number, _: error(429, **{"retry-after": "0.4"}) if number == 0 else completion("[[A=B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge(matches(1))
    assert time.monotonic() - start >= 0.4


def test_a_silent_endpoint_costs_the_timeout_and_is_asked_again(tmp_path: Path) -> None:
    release = threading.Event()

    def script(number: int, _: dict[str, Any]) -> Reply:
        if number == 0:
            release.wait(10)
        return completion("[[B>A]]")

    start = time.monotonic()
    with serving(script) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, timeout=0.3).judge(matches(1))) == ["B>A"]
        assert 0.3 <= time.monotonic() - start < 5
        release.set()


def test_an_endpoint_that_dribbles_is_as_good_as_silent(tmp_path: Path) -> None:
    status, headers, body = completion("[[A>B]]")
    slow = (status, {**headers, "x-slow": "yes"}, body)  # a byte every 0.1 s: no single wait reaches the timeout
    start = time.monotonic()
    with serving(lambda number, _: slow if number == 0 else completion("[[B>A]]")) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, timeout=0.5).judge(matches(1))) == ["B>A"]
    assert time.monotonic() - start < len(body) * 0.1 / 2


def test_a_reply_without_verdict_is_asked_for_one_once(tmp_path: Path) -> None:
    with serving(lambda number, _: completion("Both are fine." if number == 0 else "then [[a=b]]")) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path)
        (game,) = judge.judge(matches(1))
    assert game.score == "A=B" and game.judgment == {"answer": "Both are fine.\nthen [[a=b]]"}
    assert [message["role"] for message in endpoint.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert judge.input_tokens == 20


@pytest.mark.parametrize("garbage", ["I like turtles", "[[A>>>B]] [A]", "", None])
def test_garbage_is_counted_within_what_is_allowed_and_never_cached(garbage: str | None, tmp_path: Path) -> None:
    def script(_: int, request: dict[str, Any]) -> Reply:
        return completion(garbage if "Question 0?" in request["messages"][1]["content"] else "[[A>>B]]")

    with serving(script) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, max_failed=0.1).judge(matches(10))) == [None] + ["A>>B"] * 9
    assert len(endpoint.requests) == 11
    assert len(read_cache(tmp_path / "cache.jsonl")) == 9
    with serving(lambda *_: completion("[[B>A]]")) as endpoint:  # run again: only the failed game is asked
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(10))) == ["B>A"] + ["A>>B"] * 9
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("trouble", [error(500), error(400), completion("nothing"), (200, {}, b"")], ids=["500", "400", "garbage", "empty"])
def test_too_many_failures_stop_the_stage_with_one_sentence(trouble: Reply, tmp_path: Path) -> None:
    with (
        serving(lambda *_: trouble) as endpoint,
        pytest.raises(ValueError, match=r"^judge judge: 2 of 10 games have no verdict, more than max_failed=0.1 allows .*$") as caught,
    ):
        openai_judge(endpoint.url, tmp_path, max_failed=0.1, max_attempts=2).judge(matches(10))
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)


def test_an_endpoint_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    with serving(lambda *_: completion("")) as endpoint:
        url = endpoint.url
    with pytest.raises(ValueError, match=r"1 of 1 games have no verdict.*APIConnectionError"):
        openai_judge(url, tmp_path, max_attempts=2).judge(matches(1))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_judge_stops_at_once_and_names_the_variable_but_not_the_key(status: int, tmp_path: Path, capfd: Any) -> None:
    with serving(lambda *_: error(status)) as endpoint, pytest.raises(ValueError, match=f"answers {status}.*JUDGE_KEY") as caught:
        openai_judge(endpoint.url, tmp_path, concurrency=1, max_failed=1.0).judge(matches(5))
    assert len(endpoint.requests) == 1
    assert SECRET not in str(caught.value) + "".join(capfd.readouterr())


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
        cache.write_bytes(written[: written.rindex("定".encode()) + 1])  # the process died within a character of the last line
        assert len(read_cache(cache)) == 3
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(4))) == ["A>B"] * 4
        assert len(endpoint.requests) == 5
        again = openai_judge(endpoint.url, tmp_path)
        assert scores(again.judge(matches(4))) == ["A>B"] * 4
        assert len(endpoint.requests) == 5 and again.input_tokens == 40
    assert len(read_cache(cache)) == 4


def test_the_same_game_of_two_models_is_asked_once_and_swapped_games_twice(tmp_path: Path) -> None:
    one = Match(question(), "x", "y")
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge([one, one, Match(question(), "y", "x")])
    assert len(endpoint.requests) == 2


def test_concurrency_hides_the_latency_of_the_endpoint(tmp_path: Path) -> None:
    def script(*_: object) -> Reply:
        time.sleep(0.2)
        return completion("[[A=B]]")

    start = time.monotonic()
    with serving(script) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, concurrency=16).judge(matches(64))) == ["A=B"] * 64
    assert endpoint.most_busy > 8
    assert time.monotonic() - start < 64 * 0.2 / 2  # one after the other would take 12.8 s, the ideal is 0.8 s


def test_requests_are_spaced_as_the_limit_asks(tmp_path: Path) -> None:
    times: list[float] = []

    def script(*_: object) -> Reply:
        times.append(time.monotonic())
        return completion("[[A=B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, concurrency=16, requests_per_minute=600)
        judge.judge(matches(6))
        judge.judge(matches(8))  # two more: the pace goes on
    assert judge.requests == len(times) == 8
    gaps = [later - earlier for earlier, later in pairwise(sorted(times))]
    assert sum(gaps) > 7 * 0.1 * 0.9 and sum(gap > 0.07 for gap in gaps) >= 5  # 600 a minute: one every 0.1 s


REFUSALS = {
    "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "temperature": "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
}


def test_a_reasoning_endpoint_is_asked_in_its_own_words(tmp_path: Path) -> None:
    """Refuses first one parameter, then the other, of several requests in flight; every game still gets its verdict."""

    def script(_: int, request: dict[str, Any]) -> Reply:
        for name, message in REFUSALS.items():
            if name in request:
                return 400, {"content-type": "application/json"}, json.dumps({"error": {"message": message, "param": name}}).encode()
        return completion("[[A>B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, concurrency=4)
        assert scores(judge.judge(matches(12))) == ["A>B"] * 12
    assert judge.client.settings == {"max_completion_tokens": 64} and judge.failed == 0
    assert len(endpoint.requests) <= 12 + 2 * 4 and endpoint.requests[-1]["max_completion_tokens"] == 64


def test_another_wrong_request_is_not_repeated(tmp_path: Path) -> None:
    body = json.dumps({"error": {"message": "the prompt is too long"}}).encode()
    with serving(lambda *_: (400, {"content-type": "application/json"}, body)) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=1.0)
        assert scores(judge.judge(matches(3))) == [None] * 3
    assert len(endpoint.requests) == 3 and judge.client.settings == {"max_tokens": 64, "temperature": 0}


def test_failures_are_counted_over_all_calls(tmp_path: Path) -> None:
    """Asked in turns, with a fifth allowed: 2 of 10 pass, a third of 13 does not."""

    def script(_: int, request: dict[str, Any]) -> Reply:
        failing = any(f"Question {n}?" in request["messages"][1]["content"] for n in (0, 1, 12))
        return completion("nothing" if failing else "[[A>B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=0.2)
        assert scores(judge.judge(matches(10))) == [None, None] + ["A>B"] * 8
        with pytest.raises(ValueError, match=r"3 of 13 games have no verdict, more than max_failed=0.2"):
            judge.judge(matches(13)[10:])


def test_tokens_of_all_verdicts_are_counted_also_of_failed_ones(tmp_path: Path) -> None:
    def script(_: int, request: dict[str, Any]) -> Reply:
        return completion("nothing" if "Question 0?" in request["messages"][1]["content"] else "[[A>B]]")

    with serving(script) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=1.0)
        judge.judge(matches(2))
        judge.judge(matches(3))
    assert (judge.games, judge.failed, judge.requests) == (5, 2, 2 + 1 + 2 + 1)
    assert (judge.input_tokens, judge.output_tokens) == (10 * (2 + 1 + 1), 3 * (2 + 1 + 1))


def test_a_server_that_died_is_told_at_once_and_not_waited_for(tmp_path: Path) -> None:
    """Behind the endpoint is a server of our own: its death ends the stage, whatever attempts and failures are allowed."""
    with serving(lambda *_: completion("")) as endpoint:
        url = endpoint.url

    def check() -> None:
        raise ServerFailed("the local server of judge died (exit code 9)")

    judge = openai_judge(url, tmp_path, max_failed=1.0, max_attempts=50, pause=60.0)
    judge.client.connect = lambda: Connection(url, "key", "", check, local=True)
    start = time.monotonic()
    with pytest.raises(ServerFailed, match="exit code 9"):
        judge.judge(matches(8))
    assert time.monotonic() - start < 10


def test_a_local_server_is_asked_without_a_proxy_and_says_why_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    body = json.dumps({"error": {"message": "the prompt is too long"}}).encode()
    replies = [completion("[[A>B]]"), (400, {"content-type": "application/json"}, body)]
    with serving(lambda number, _: replies[number]) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=1.0, concurrency=1)
        judge.client.connect = lambda: Connection(endpoint.url, "key", "", local=True)
        games = judge.judge(matches(2))
    assert scores(games) == ["A>B", None] and "HTTP 400" in games[1].judgment["answer"] and "too long" in games[1].judgment["answer"]
    assert endpoint.keys == ["Bearer key"] * 2


def test_nothing_to_ask_connects_to_nobody(tmp_path: Path) -> None:
    with serving(lambda *_: completion("[[A>B]]")) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge(matches(2))
    judge = openai_judge("http://nowhere/v1", tmp_path)

    def connect() -> Connection:
        raise AssertionError("a server would have been started")

    judge.client.connect = connect
    assert scores(judge.judge(matches(2))) == ["A>B"] * 2
    judge.identity = "other weights"
    with pytest.raises(AssertionError, match="started"):  # the same name with other weights: nothing of it is known
        judge.judge(matches(2))
