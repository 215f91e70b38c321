"""Defines requests to a reward source and their replies: one contract for functions and servers. Torch-free.

A request has lists of equal length, one entry for each answer: `prompts` (chat messages), `responses` (text), `rows` (all columns of the
prompt's row), `finished` (False: cut at the length limit), `query` (prompt and answer as one text, template included).
The reply has one finite number for each answer, `{"rewards": [...]}` from a server. An entry that is null, nan, infinite or no number
is a failed reward, and so is every entry of a reply that cannot be read or has another length. A failed reward is never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Sample(NamedTuple):
    """One answer to be rewarded."""

    prompt: Sequence[dict[str, str]]
    response: str
    row: dict[str, Any]
    finished: bool
    query: str


class RewardError(Exception):
    """One request went wrong; the next may not."""


class WrongReply(RewardError):
    """A reply that does not fit its request. It might fit a smaller request by chance: the same one is sent again."""


class RewardsFailed(RuntimeError):
    """A source left more answers without a reward than the recipe allows; the message names it."""


def question(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The lists of the contract."""
    return {
        "prompts": [list(sample.prompt) for sample in samples],
        "responses": [sample.response for sample in samples],
        "rows": [sample.row for sample in samples],
        "finished": [sample.finished for sample in samples],
        "query": [sample.query for sample in samples],
    }


def question_json(samples: Sequence[Sample]) -> str:
    """The question as JSON; what JSON does not know (dates of a parquet file) becomes text."""
    return json.dumps(question(samples), default=str, ensure_ascii=False)


def read_reply(text: str | bytes, count: int) -> np.ndarray:
    """The rewards of a JSON reply: (count,) float64, nan where one failed. WrongReply when the reply as a whole is no answer."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise WrongReply(f"its answer is no JSON: {_shown(text)}") from None
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise WrongReply(f'its answer has no "rewards": {_shown(text)}')
    return read_rewards(reply["rewards"], count)


def read_rewards(rewards: Any, count: int) -> np.ndarray:
    """A list of numbers as (count,) float64, nan where one is no finite number. WrongReply for another type or length."""
    if not isinstance(rewards, list | tuple):
        raise WrongReply(f"its rewards are no list but {type(rewards).__name__}")
    if len(rewards) != count:
        raise WrongReply(f"it gave {len(rewards)} rewards for {count} answers")
    return np.array([_number(value) for value in rewards], dtype=np.float64)


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
