"""A judge whose endpoint refuses, fails, hangs or talks nonsense: what is asked again, what is counted, and
what stops the stage."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.chat_judge import CachedVerdict
from rlhf_core.judging.chat_client import Connection
from rlhf_core.judging.record_lines import records_of
from rlhf_core.rollout.vllm.vllm_server import ServerFailed
from tests.support.chat_endpoint import SECRET, Reply, completion, error, serving
from tests.support.judging import matches, openai_judge, scores

pytestmark = pytest.mark.usefixtures("judge_key")
REFUSALS = {
    "max_tokens": (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'"
        " instead."
    ),
    "temperature": (
        "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is"
        " supported."
    ),
}


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
    ids=[
        "429",
        "429 with seconds",
        "429 with a date",
        "500",
        "503",
        "half JSON",
        "a page",
        "no choice",
        "half a body",
    ],
)
def test_a_troubled_endpoint_is_asked_again(trouble: Reply, tmp_path: Path) -> None:
    with serving(lambda number, _: trouble if number < 2 else completion("[[A>B]]")) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(1))) == ["A>B"]
    assert len(endpoint.requests) == 3


def test_the_endpoints_own_pause_is_respected(tmp_path: Path) -> None:
    start = time.monotonic()
    with serving(
        lambda number, _: error(429, **{"retry-after": "0.4"}) if number == 0 else completion("[[A=B]]")
    ) as endpoint:
        openai_judge(endpoint.url, tmp_path).judge(matches(1))
    assert time.monotonic() - start >= 0.4


def test_a_silent_endpoint_costs_the_timeout_and_is_asked_again(tmp_path: Path) -> None:
    release = threading.Event()

    def script(number: int, _: dict[str, Any]) -> Reply:
        if number == 0:
            release.wait(60)
        return completion("[[B>A]]")

    start = time.monotonic()
    with serving(script) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, timeout=1.0).judge(matches(1))) == ["B>A"]
        assert 1.0 <= time.monotonic() - start < 50
        release.set()


def test_an_endpoint_that_dribbles_is_as_good_as_silent(tmp_path: Path) -> None:
    status, headers, body = completion("[[A>B]]")
    # a byte every 0.1 s: no single wait reaches the timeout
    slow = (status, {**headers, "x-slow": "yes"}, body)
    start = time.monotonic()
    with serving(lambda number, _: slow if number == 0 else completion("[[B>A]]")) as endpoint:
        assert scores(openai_judge(endpoint.url, tmp_path, timeout=1.0).judge(matches(1))) == ["B>A"]
    assert time.monotonic() - start < len(body) * 0.1 / 2


@pytest.mark.parametrize("garbage", ["I like turtles", "[[A>>>B]] [A]", "", None])
def test_garbage_is_counted_within_what_is_allowed_and_never_cached(
    garbage: str | None, tmp_path: Path
) -> None:
    def script(_: int, request: dict[str, Any]) -> Reply:
        return completion(garbage if "Question 0?" in request["messages"][1]["content"] else "[[A>>B]]")

    with serving(script) as endpoint:
        assert (
            scores(openai_judge(endpoint.url, tmp_path, max_failed=0.1).judge(matches(10)))
            == [None] + ["A>>B"] * 9
        )
    assert len(endpoint.requests) == 11
    assert len(list(records_of(tmp_path / "cache.jsonl", CachedVerdict))) == 9
    with serving(lambda *_: completion("[[B>A]]")) as endpoint:  # run again: only the failed game is asked
        assert scores(openai_judge(endpoint.url, tmp_path).judge(matches(10))) == ["B>A"] + ["A>>B"] * 9
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "answers 401 to a request without a key: set api_key_env to .*, such as OPENAI_API_KEY$"),
        (403, "answers 403 to a request without a key: set api_key_env to .*, such as OPENAI_API_KEY$"),
        (404, "answers 404 for model 'judge': check the model's name and base_url$"),
    ],
)
def test_an_endpoint_that_wants_a_key_is_told_where_to_name_it(
    tmp_path: Path, status: int, told: str
) -> None:
    with serving(lambda *_: error(status)) as endpoint, pytest.raises(ValueError, match=told) as caught:
        openai_judge(endpoint.url, tmp_path, api_key_env=None).judge(matches(1))
    assert SECRET not in str(caught.value) and endpoint.keys == ["Bearer none"]


@pytest.mark.parametrize(
    "trouble",
    [error(500), error(400), completion("nothing"), (200, {}, b"")],
    ids=["500", "400", "garbage", "empty"],
)
def test_too_many_failures_stop_the_stage_with_one_sentence(trouble: Reply, tmp_path: Path) -> None:
    with (
        serving(lambda *_: trouble) as endpoint,
        pytest.raises(
            ValueError,
            match=r"^judge judge: 2 of 10 games have no verdict, more than max_failed=0.1 allows .*$",
        ) as caught,
    ):
        openai_judge(endpoint.url, tmp_path, max_failed=0.1, max_attempts=2).judge(matches(10))
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)


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


def test_an_endpoint_that_is_not_there_is_named_as_such(tmp_path: Path) -> None:
    with serving(lambda *_: completion("")) as endpoint:
        url = endpoint.url
    with pytest.raises(ValueError, match=r"1 of 1 games have no verdict.*APIConnectionError"):
        openai_judge(url, tmp_path, max_attempts=2).judge(matches(1))


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_judge_stops_at_once_and_names_the_variable_but_not_the_key(
    status: int, tmp_path: Path, capfd: Any
) -> None:
    with (
        serving(lambda *_: error(status)) as endpoint,
        pytest.raises(ValueError, match=f"answers {status}.*JUDGE_KEY") as caught,
    ):
        openai_judge(endpoint.url, tmp_path, concurrency=1, max_failed=1.0).judge(matches(5))
    assert len(endpoint.requests) == 1
    assert SECRET not in str(caught.value) + "".join(capfd.readouterr())


def test_a_reasoning_endpoint_is_asked_in_its_own_words(tmp_path: Path) -> None:
    """Refuses first one parameter, then the other, of several requests in flight; every game still gets its
    verdict."""

    def script(_: int, request: dict[str, Any]) -> Reply:
        for name, message in REFUSALS.items():
            if name in request:
                return (
                    400,
                    {"content-type": "application/json"},
                    json.dumps({"error": {"message": message, "param": name}}).encode(),
                )
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


def test_a_server_that_died_is_told_at_once_and_not_waited_for(tmp_path: Path) -> None:
    """Behind the endpoint is a server of our own: its death ends the stage, whatever attempts and failures
    are allowed."""
    with serving(lambda *_: completion("")) as endpoint:
        url = endpoint.url

    def check() -> None:
        raise ServerFailed("the local server of judge died (exit code 9)")

    judge = openai_judge(url, tmp_path, max_failed=1.0, max_attempts=50, pause=60.0)
    judge.client.connect = lambda: Connection(url, "key", "", check, local=True)
    start = time.monotonic()
    with pytest.raises(ServerFailed, match="exit code 9"):
        judge.judge(matches(8))
    assert time.monotonic() - start < 50


def test_a_local_server_is_asked_without_a_proxy_and_says_why_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    body = json.dumps({"error": {"message": "the prompt is too long"}}).encode()
    replies = [completion("[[A>B]]"), (400, {"content-type": "application/json"}, body)]
    with serving(lambda number, _: replies[number]) as endpoint:
        judge = openai_judge(endpoint.url, tmp_path, max_failed=1.0, concurrency=1)
        judge.client.connect = lambda: Connection(endpoint.url, "key", "", local=True)
        games = judge.judge(matches(2))
    assert (
        scores(games) == ["A>B", None]
        and "HTTP 400" in games[1].judgment["answer"]
        and "too long" in games[1].judgment["answer"]
    )
    assert endpoint.keys == ["Bearer key"] * 2
