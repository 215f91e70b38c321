"""Reward functions of the demo's recipes. A function's parameters name what it needs of prompts, responses,
rows, finished and query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def bare(responses: Sequence[str], finished: Sequence[bool]) -> list[float]:
    """Returns 1 for a finished answer that contains only digits, like every right answer of the demo,
    otherwise 0."""
    return [
        float(done and response.strip().isdigit()) for response, done in zip(responses, finished, strict=True)
    ]


def right(
    responses: Sequence[str], finished: Sequence[bool], rows: Sequence[Mapping[str, str]]
) -> list[float]:
    """Returns 1 for a finished answer that equals the row's column `answer`, otherwise 0."""
    return [
        float(done and response.strip() == row["answer"])
        for response, done, row in zip(responses, finished, rows, strict=True)
    ]
