"""Reads a judge's rating by the rules of `rlhf_core/judging/marked_reply.py`, and turns it into a reward.

A verdict is [[N]], or with criteria [[NAME: N, NAME: N]]. These variations are accepted: N/HIGHEST, a word
before the number ([[rating: 7]]), = instead of the colon, and criteria in another order or case. The last
verdict counts; a number outside the scale is not a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.judging.marked_reply import MarkedReply, Marker, read_marked

Rating = tuple[float, ...]  # one number, or one per criterion
_BRACKETS = re.compile(r"\[\[([^\[\]\n]{1,2000})\]\]")
_ENTRY = re.compile(
    r"(?:(?P<name>[^\W\d_][\w -]*?)\s*[:=])?\s*(?P<number>[+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
    r"(?:\s*/\s*(?P<best>[0-9]{1,9}(?:\.[0-9]{1,9})?))?"
)


def read_rating(
    source: JudgeReward, reply: str, texts: Sequence[str], cut: bool = False
) -> MarkedReply[Rating]:
    """Returns the rating in a judge's reply about these texts: one number, or one per criterion in the
    recipe's order. `cut`: whether the length limit truncated the reply."""
    found = read_marked(reply, texts, partial(_ratings, source), cut)
    low, high = source.scale
    if found.value is not None and not all(low <= number <= high for number in found.value):
        return MarkedReply(None, f"the verdict is outside the scale from {low:g} to {high:g}")
    return found


def reward_of(source: JudgeReward, rating: Rating) -> float:
    """Maps a rating linearly to a reward from 0 (lowest on the scale) to 1 (highest). With criteria, the
    reward is their weighted mean."""
    low, high = source.scale
    weights = [criterion.weight for criterion in source.criteria] or [1.0]
    mean = sum(weight * number for weight, number in zip(weights, rating, strict=True)) / sum(weights)
    return (mean - low) / (high - low)


def _ratings(source: JudgeReward, text: str) -> Iterator[Marker[Rating]]:
    """Yields the ratings in a text, in order, including ratings outside the scale."""
    for match in _BRACKETS.finditer(text):
        rating = _rating(source, match[1])
        if rating is not None:
            yield Marker(rating, match.start(), match.end())


def _rating(source: JudgeReward, content: str) -> Rating | None:
    """Returns the numbers between a marker's brackets; None if they do not have the required form."""
    entries = [_ENTRY.fullmatch(entry.strip()) for entry in re.split(r"[,;]", content)]
    numbers: dict[str, float] = {}
    for entry in entries:
        if entry is None or (entry["best"] is not None and float(entry["best"]) != source.scale[1]):
            return None
        numbers[(entry["name"] or "").lower()] = float(entry["number"])
    if not source.criteria:
        return tuple(numbers.values()) if len(entries) == 1 else None
    names = [criterion.name.lower() for criterion in source.criteria]
    if len(entries) != len(names) or set(numbers) != set(names):
        return None
    return tuple(numbers[name] for name in names)
