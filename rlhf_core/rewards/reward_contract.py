"""Defines requests to a reward source and their replies: one contract for functions and servers. Torch-free.

A request has lists of equal length with one entry per answer: `prompts` (chat messages), `responses` (text),
`rows` (all columns of the prompt's row), `finished` (False: truncated by a token limit or, in an episode, a
turn limit), `query` (prompt and answer as one string, including the template). The reply has one finite
number per answer; a server sends `{"rewards": [...]}`. Instead of a number, an entry may list the steps of an
answer as `[[end, reward], ...]`: the number of characters of the response up to the step's end, and the
step's reward. The answer's reward is their sum, or 0 without steps.

An entry that is null, nan, infinite or of another type is a failed reward. If a reply cannot be read or has
the wrong length, all its rewards have failed. A failed reward is never 0. Finite rewards, including the
rewards of steps and environments, are clipped to +-1e30 (`LARGEST`), so that their sums stay finite in
float32, which training uses.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Sample(NamedTuple):
    """An answer to be rewarded."""

    prompt: Sequence[dict[str, str]]
    response: str
    row: dict[str, Any]
    finished: bool
    query: str


Steps = Sequence[tuple[int, float]]  # (characters of the response up to the step's end, the step's reward)


class Reply(NamedTuple):
    """Rewards (N,), nan where a reward failed, and the rewarded steps of answers that have them, by answer
    index."""

    rewards: np.ndarray
    steps: Mapping[int, Steps]


class RewardError(Exception):
    """Raised when one request fails; the next may succeed."""


class WrongReply(RewardError):
    """Raised when a reply does not fit its request. The same request is repeated unsplit, since the reply
    might fit a smaller request by chance."""


class CodeError(RewardError):
    """Raised when the user's code has a bug, such as a NameError. `place`: type, file and line, identical for
    every answer. `certain`: as in `UsersError`."""

    def __init__(self, message: str, place: str, certain: bool = False):
        super().__init__(message, place, certain)
        self.place = place
        self.certain = certain

    def __str__(self) -> str:
        return str(self.args[0])


class RewardsFailed(RuntimeError):
    """Raised when a source leaves more answers without a reward than the recipe allows. The message names the
    source."""


class SourceRewards(NamedTuple):
    """One source's rewards for N answers, (N,), nan where a reward failed; the last error; and the steps of
    answers by index."""

    rewards: np.ndarray
    error: str
    steps: Mapping[int, Steps]


def check_failures(title: str, failed: int, allowed: int, requested: int, error: str) -> None:
    """Raises RewardsFailed when more than `allowed` answers have no reward."""
    if failed > allowed:
        raise RewardsFailed(
            f"the reward source {title} left {failed} of {requested} answers without a reward, more than the"
            f" {allowed} that max_failed_rewards allows (the last error:"
            f" {error or 'a score that is not finite'}); look at the source, then run again"
        )


LARGEST = 1e30  # absolute reward; sums of such rewards are finite in float32
LISTS = frozenset(("prompts", "responses", "rows", "finished", "query"))


def bounded(rewards: ArrayLike) -> np.ndarray:
    """Returns rewards as float64 with finite values clipped to +-LARGEST. Failed rewards (infinite or nan)
    stay unchanged."""
    values = np.asarray(rewards, dtype=np.float64)
    return np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)


def question(samples: Sequence[Sample], wanted: Collection[str] = LISTS) -> dict[str, list[Any]]:
    """Returns the contract's lists named in `wanted`."""
    lists: dict[str, list[Any]] = {
        "prompts": [list(sample.prompt) for sample in samples],
        "responses": [sample.response for sample in samples],
        "rows": [sample.row for sample in samples],
        "finished": [sample.finished for sample in samples],
        "query": [sample.query for sample in samples],
    }
    return {name: values for name, values in lists.items() if name in wanted}


def question_json(samples: Sequence[Sample], wanted: Collection[str] = LISTS) -> str:
    """Returns the question as JSON. Values of types that JSON lacks, such as dates in a parquet file, become
    strings; bytes, such as an image, are replaced by their number."""
    return json.dumps(question(samples, wanted), default=_as_string, ensure_ascii=False)


def _as_string(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes | bytearray) else str(value)


def read_reply(text: str | bytes, count: int) -> Reply:
    """Returns the rewards in a JSON reply. Raises WrongReply when the reply as a whole is invalid."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongReply(f"its answer is not JSON: {_shown(text)}") from None
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise WrongReply(f'its answer has no "rewards": {_shown(text)}')
    return read_rewards(reply["rewards"], count)


def read_rewards(rewards: Any, count: int) -> Reply:
    """Converts a list of numbers or steps to `bounded` float64 rewards (count,), with nan for entries without
    a finite number. Raises WrongReply for another type or length."""
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
    """Returns the steps in order; None unless `value` is a list of pairs of a non-negative integer and a
    finite number."""
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


def on_tokens(steps: Steps, lengths: Sequence[int]) -> np.ndarray:
    """Returns the reward of each token of an answer, (T,). A step's reward goes to the token that completes
    the step's last character, or else to the last token.

    `lengths` (T,): the number of complete characters of the answer after each token.
    """
    rewards = np.zeros(len(lengths), np.float32)
    for end, reward in steps:
        rewards[min(bisect_left(lengths, end), len(lengths) - 1)] += reward
    return rewards
