"""Defines requests to a reward source and their replies: one contract for functions and servers. Torch-free.

A request has lists of equal length, one entry for each answer: `prompts` (chat messages), `responses` (text),
`rows` (all columns of the prompt's row), `finished` (False: a limit of tokens, of an episode also of turns,
cut it), `query` (prompt and answer as one text, template included). The reply has one finite number for each
answer, `{"rewards": [...]}` from a server. In place of a number an entry may list the steps of an answer,
`[[end, reward], ...]`: the characters of the response up to the step's end, and the step's reward; their sum
is the answer's, 0 without a step. An entry that is null, nan, infinite or nothing of these is a failed
reward, and so is every entry of a reply that cannot be read or has another length. A failed reward is never
0. A finite reward beyond +-1e30 (`LARGEST`) counts as +-1e30, also of a step and of an environment: sums of
such rewards are finite in float32, in which training computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Sample(NamedTuple):
    """One answer to be rewarded."""

    prompt: Sequence[dict[str, str]]
    response: str
    row: dict[str, Any]
    finished: bool
    query: str


Steps = Sequence[tuple[int, float]]  # (characters of the response up to the step's end, the step's reward)


class Reply(NamedTuple):
    """Holds (N,) rewards, nan where one failed, and the steps of answers whose steps were rewarded, by their
    index."""

    rewards: np.ndarray
    steps: Mapping[int, Steps]


class RewardError(Exception):
    """One request went wrong; the next may not."""


class WrongReply(RewardError):
    """A reply that does not fit its request. It might fit a smaller request by chance: the same one is sent
    again."""


class CodeError(RewardError):
    """The user's code raised an error that is its own, such as a NameError. `place`: type, file and line, the
    same for every answer; `certain`: as of `UsersError`."""

    def __init__(self, message: str, place: str, certain: bool = False):
        super().__init__(message, place, certain)
        self.place = place
        self.certain = certain

    def __str__(self) -> str:
        return str(self.args[0])


class RewardsFailed(RuntimeError):
    """A source left more answers without a reward than the recipe allows; the message names it."""


LARGEST = 1e30  # of a reward: sums of them are finite in float32
LISTS = frozenset(("prompts", "responses", "rows", "finished", "query"))


def bounded(rewards: ArrayLike) -> np.ndarray:
    """Returns rewards as float64, finite ones clipped to +-LARGEST; infinite ones and nan, which are failed
    rewards, stay what they are."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)


def question(samples: Sequence[Sample], wanted: Collection[str] = LISTS) -> dict[str, list[Any]]:
    """The lists of the contract, or some of them."""
    lists: dict[str, list[Any]] = {
        "prompts": [list(sample.prompt) for sample in samples],
        "responses": [sample.response for sample in samples],
        "rows": [sample.row for sample in samples],
        "finished": [sample.finished for sample in samples],
        "query": [sample.query for sample in samples],
    }
    return {name: values for name, values in lists.items() if name in wanted}


def question_json(samples: Sequence[Sample], wanted: Collection[str] = LISTS) -> str:
    """The question as JSON; what JSON does not know (dates of a parquet file) becomes text."""
    return json.dumps(question(samples, wanted), default=str, ensure_ascii=False)


def read_reply(text: str | bytes, count: int) -> Reply:
    """The rewards of a JSON reply. WrongReply when the reply as a whole is no answer."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongReply(f"its answer is no JSON: {_shown(text)}") from None
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise WrongReply(f'its answer has no "rewards": {_shown(text)}')
    return read_rewards(reply["rewards"], count)


def read_rewards(rewards: Any, count: int) -> Reply:
    """A list of numbers or steps as (count,) float64, `bounded`, nan where one has no finite number.
    WrongReply for another type or length."""
    if not isinstance(rewards, list | tuple):
        raise WrongReply(f"its rewards are no list but {type(rewards).__name__}")
    if len(rewards) != count:
        raise WrongReply(f"it gave {len(rewards)} rewards for {count} answers")
    steps = {i: found for i, value in enumerate(rewards) if (found := _steps(value)) is not None}
    values = [
        sum(reward for _, reward in steps[i]) if i in steps else _number(value)
        for i, value in enumerate(rewards)
    ]
    return Reply(bounded(values), {i: found for i, found in steps.items() if found})


def _steps(value: Any) -> Steps | None:
    """Returns steps in order, or None for what is no list of pairs of a whole number and a finite one."""
    if not isinstance(value, list | tuple) or any(
        not isinstance(step, list | tuple) or len(step) != 2 for step in value
    ):
        return None
    if any(type(end) is not int or end < 0 or math.isnan(_number(reward)) for end, reward in value):
        return None
    return sorted((end, float(bounded(reward))) for end, reward in value)


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        try:
            return float(value) if math.isfinite(value) else math.nan
        except OverflowError:
            return math.nan
    return math.nan


def _shown(text: str | bytes) -> str:
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    return repr(whole if len(whole) <= 80 else whole[:77] + "...")
