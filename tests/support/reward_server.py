"""Six answers to reward, and a local server of rewards that behaves as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlhf_core.rewards.reward_contract import Sample
from tests.support.http_handler import JsonHandler, handled_by

SAMPLES = [
    Sample(
        [{"role": "user", "content": f"say {i}"}], "x" * i, {"answer": str(i)}, True, f"<say {i}>{'x' * i}"
    )
    for i in range(1, 7)
]
Reply = tuple[int, Any]  # status; a body, a dict as JSON


def lengths(question: dict[str, Any]) -> Reply:
    """What a server that works says: each answer's length."""
    return 200, {"rewards": [len(response) for response in question["responses"]]}


class Served(NamedTuple):
    """A local server; `behave` maps (number of the request, question) to a reply, `requests` keeps the
    questions and their headers."""

    url: str
    requests: list[tuple[dict[str, Any], dict[str, str]]]
    behave: list[Callable[[int, dict[str, Any]], Reply]]


@contextmanager
def serving_rewards() -> Iterator[Served]:
    state = Served("", [], [lambda number, question: lengths(question)])

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            question = self.question()
            state.requests.append((question, {name.lower(): value for name, value in self.headers.items()}))
            self.reply(*state.behave[0](len(state.requests), question))

    with handled_by(Handler) as address:
        yield state._replace(url=f"{address}/score")
