"""Games to judge, and a judge that asks an endpoint (tests/support/chat_endpoint.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.judges.chat_judge import LlmJudge
from evaluation.judges.offline import Match
from rlhf_core import config as configs
from rlhf_core.data.questions import Question
from rlhf_core.judging.chat_client import ChatClient, remote
from rlhf_core.records import Game


def question(uid: str = "q1", prompt: str = "What is 2 + 2?", category: str = "sums", **row: Any) -> Question:
    return Question(uid, category, ({"role": "user", "content": prompt},), row)


def openai_judge(url: str, folder: Path, **changes: Any) -> LlmJudge:
    settings: dict[str, Any] = dict(
        max_tokens=64, concurrency=4, max_failed=0.0, timeout=60.0, max_attempts=4
    )
    settings |= {"api_key_env": "JUDGE_KEY", "pause": 0.01, **changes}
    pause = settings.pop("pause")
    config = configs.OpenAIJudge(model="judge", base_url=url, **settings)
    client = ChatClient(
        "judge judge",
        "judge",
        lambda: remote(config),
        {"max_tokens": config.max_tokens, "temperature": 0},
        config,
        pause,
    )
    return LlmJudge("judge", client, folder / "cache.jsonl", "judge", config.max_failed)


def matches(count: int) -> list[Match]:
    return [Match(question(f"q{n}", f"Question {n}?"), f"first {n}", f"second {n}") for n in range(count)]


def scores(games: Sequence[Game]) -> list[str | None]:
    return [game.score for game in games]
