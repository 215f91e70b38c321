"""A judge endpoint that does everything wrong at once: the run completes or stops as configured, counts
match, nothing is asked twice."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from evaluation.judges.chat_judge import CachedVerdict, LlmJudge
from rlhf_core.judging.record_lines import records_of
from tests.support.chat_endpoint import SECRET, Reply, completion, error, serving
from tests.support.judging import matches, openai_judge, scores

pytestmark = pytest.mark.usefixtures("judge_key")
GAMES = 60
HALF = (
    200,
    {"content-type": "application/json", "content-length": "1000"},
    b'{"choices": [{"message": {"content": "[[A>',
)
# What comes before a verdict, and goes away when it is asked again.
TROUBLES: dict[str, Reply] = {
    "429": error(429, **{"retry-after": "0.01"}),
    "500": error(500),
    "503": error(503),
    "half a body": HALF,
    "half JSON": (200, {"content-type": "application/json"}, b'{"choices": [{"mess'),
    "a page": (200, {"content-type": "text/html"}, b"<html>busy</html>"),
}
# Verdicts in all shapes: the label they stand for.
VERDICTS = {
    "[[A>B]]": "A>B",
    "my verdict is [[b>>a]]": "B>>A",
    "First [[A>>B]], but after all [[B>A]].": "B>A",
    "裁定：两个回答一样好。[[A=B]]": "A=B",
    "Mi veredicto: la respuesta A es mucho mejor. [[a>>b]]": "A>>B",
    "Mein Urteil lautet [[A<B]], also B.": "B>A",
    "結論は [B>A] です": "B>A",
    "[[ B > A ]]": "B>A",
}
GARBAGE = ("Both are wonderful.", "[[A>>>B]]", "[A]", "", "😀" * 50, "[[ A >> > B ]]")


class Storm:
    """Every question has its own fate, drawn by a seed: some troubles (and sometimes silence), then a
    verdict, or garbage for ever."""

    def __init__(self, seed: int, garbage: float, cured: bool = False):
        self.seed = seed
        self.garbage = garbage
        self.cured = cured
        self.asked: dict[str, int] = {}
        self.lock = threading.Lock()
        self.release = threading.Event()

    def fate(self, key: str) -> tuple[list[str], str | None]:
        """The troubles of a question and its label; None: it never gives one."""
        generator = random.Random(f"{self.seed}/{key}")
        troubles = generator.choices(
            [*TROUBLES, "silence"], weights=[3] * len(TROUBLES) + [1], k=generator.randrange(3)
        )
        words = generator.choice(list(VERDICTS))
        return troubles, (words if self.cured or generator.random() >= self.garbage else None)

    def __call__(self, _: int, request: dict[str, Any]) -> Reply:
        found = re.search(r"Question (\d+)\?", request["messages"][1]["content"])
        assert found
        with self.lock:
            turn = self.asked.get(found[1], 0)
            self.asked[found[1]] = turn + 1
        troubles, words = self.fate(found[1])
        if turn < len(troubles):
            if troubles[turn] != "silence":
                return TROUBLES[troubles[turn]]
            self.release.wait(60)
            return completion("[[A=B]]")  # too late: nobody listens any more
        return completion(words if words is not None else random.Random(found[1]).choice(GARBAGE))

    def expected(self, count: int) -> list[str | None]:
        return [None if (words := self.fate(str(n))[1]) is None else VERDICTS[words] for n in range(count)]


def judge_of(url: str, folder: Path, **changes: Any) -> LlmJudge:
    return openai_judge(
        url, folder, **{"timeout": 4.0, "concurrency": 16, "max_attempts": 5, "max_failed": 1.0, **changes}
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_verdict_is_the_one_that_was_given_and_failures_are_counted(tmp_path: Path, seed: int) -> None:
    storm = Storm(seed, garbage=0.1)
    with serving(storm) as endpoint:
        judge = judge_of(endpoint.url, tmp_path)
        found = scores(judge.judge(matches(GAMES)))
        storm.release.set()
    assert found == storm.expected(GAMES)
    failed = found.count(None)
    assert (
        0 < failed < GAMES / 3
        and len(list(records_of(tmp_path / "cache.jsonl", CachedVerdict))) == GAMES - failed
    )
    assert SECRET not in (tmp_path / "cache.jsonl").read_text()


def test_a_second_run_asks_for_what_failed_and_nothing_else(tmp_path: Path) -> None:
    storm = Storm(5, garbage=0.2)
    with serving(storm) as endpoint:
        first = scores(judge_of(endpoint.url, tmp_path).judge(matches(GAMES)))
        storm.release.set()
    failed = {str(n) for n, score in enumerate(first) if score is None}
    cured = Storm(5, garbage=0.0, cured=True)
    with serving(cured) as endpoint:
        second = scores(judge_of(endpoint.url, tmp_path, max_failed=0.0).judge(matches(GAMES)))
        cured.release.set()
    assert set(cured.asked) == failed and len(failed) > 3
    assert (
        second == cured.expected(GAMES)
        and [a == b for a, b in zip(first, second, strict=True) if a is not None].count(False) == 0
    )
    with serving(cured) as endpoint:
        assert scores(judge_of(endpoint.url, tmp_path, max_failed=0.0).judge(matches(GAMES))) == second
        assert not endpoint.requests


def test_more_failures_than_allowed_stop_with_one_sentence_and_keep_what_was_paid_for(tmp_path: Path) -> None:
    storm = Storm(7, garbage=0.3)
    with (
        serving(storm) as endpoint,
        pytest.raises(
            ValueError, match=r"^judge judge: \d+ of 60 games have no verdict, more than max_fa"
        ) as e,
    ):
        judge_of(endpoint.url, tmp_path, max_failed=0.02).judge(matches(GAMES))
    storm.release.set()
    assert "\n" not in str(e.value)
    kept = len(list(records_of(tmp_path / "cache.jsonl", CachedVerdict)))
    assert kept > 0 and len(storm.asked) < GAMES, (
        "it stops as soon as it cannot end well, not after the last game"
    )
    cured = Storm(7, garbage=0.0, cured=True)
    with serving(cured) as endpoint:
        assert scores(
            judge_of(endpoint.url, tmp_path, max_failed=0.02).judge(matches(GAMES))
        ) == cured.expected(GAMES)
        cured.release.set()
    assert len(cured.asked) == GAMES - kept
