"""Games to judge, and a judge that asks an endpoint (tests/support/chat_endpoint.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.answers.chat_client import ChatClient, remote
from evaluation.judges.chat_judge import OpenAIJudge
from evaluation.judges.offline import Match
from rlhf_core.data.questions import Question
from rlhf_core.records import Game


def question(uid: str = "q1", prompt: str = "What is 2 + 2?", category: str = "sums", **row: Any) -> Question:
    return Question(uid, category, ({"role": "user", "content": prompt},), row)


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
