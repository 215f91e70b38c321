"""Several environments in one stage: rows that name theirs and rows that do not, and the order of episodes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rlhf_core.data.documents import Prompt
from rlhf_core.environments.episode_contract import EpisodeRequest
from rlhf_core.environments.episodes import Episodes
from rlhf_core.environments.episodes_by_row import EpisodesByRow
from rlhf_core.environments.row_environments import environment_problem, require_environments
from rlhf_core.rollout.engine_contract import Sampling

SAMPLING = Sampling(1, 1.0, 8, [])


class Recorded:
    """Stands for an environment's episodes: takes `seconds`, fails with `error`, writes down what it is asked."""

    def __init__(self, name: str, seconds: float = 0.0, error: str = ""):
        self.name = name
        self.seconds = seconds
        self.error = error
        self.asked: list[int] = []
        self.ended = ""

    async def run(self, asked: list[EpisodeRequest], sampling: Sampling) -> list[str]:
        self.asked += [request.seed for request in asked]
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        if self.error:
            raise ValueError(self.error)
        return [f"{self.name}{request.seed}" for request in asked]

    def close(self) -> None:
        self.ended = "closed"


def by_row(**members: Recorded) -> EpisodesByRow:
    return EpisodesByRow(cast(dict[str, Episodes], members))


def requests(*names: str) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(Prompt((), [1], {"environment": name}, False), seed, 0)
        for seed, name in enumerate(names)
    ]


def test_each_row_goes_to_its_environment_and_the_order_stays() -> None:
    slow, quick = Recorded("s", seconds=0.05), Recorded("q")
    found: Any = asyncio.run(by_row(slow=slow, quick=quick).run(requests("slow", "quick", "slow"), SAMPLING))
    assert found == ["s0", "q1", "s2"]
    assert (slow.asked, quick.asked) == ([0, 2], [1])
    assert asyncio.run(by_row(slow=slow).run([], SAMPLING)) == []


def test_the_failure_of_one_environment_ends_the_others() -> None:
    slow, wrong = Recorded("s", seconds=100), Recorded("w", error="each episode raised")

    async def run() -> None:
        with pytest.raises(ValueError, match="each episode raised"):
            await by_row(slow=slow, wrong=wrong).run(requests("slow", "wrong"), SAMPLING)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert slow.ended == "cancelled"


def test_all_are_closed() -> None:
    one, other = Recorded("a"), Recorded("b")
    by_row(one=one, other=other).close()
    assert one.ended == other.ended == "closed"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "q"}, "f, row 2: the row names no environment: write one of game, tools into its column"),
        ({"environment": None}, "f, row 2: the row names no environment"),
        ({"environment": "gane"}, "environment 'gane', which the stage does not have: did you mean game?"),
        ({"environment": 3}, "environment 3, which the stage does not have: write one of game, tools"),
    ],
)
def test_a_row_without_an_environment_of_the_stage_is_told(row: dict[str, Any], told: str) -> None:
    rows = [("f, row 1", {"environment": "game"}), ("f, row 2", row)]
    assert told in environment_problem(["game", "tools"], rows)
    assert environment_problem(["game", "tools"], rows[:1]) == ""
    assert environment_problem([], rows) == "", "a stage with one environment, or none, reads no column"
    prompts = [Prompt((), [1], each, False) for _, each in rows]
    with pytest.raises(ValueError, match="eval_prompts: number 2: the row names"):
        require_environments(["game", "tools"], prompts[:1], prompts)
