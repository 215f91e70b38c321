"""Reward functions of the demo's recipes. A function names what it wants of prompts, responses, rows,
finished and query."""

from __future__ import annotations

from collections.abc import Sequence


def bare(responses: Sequence[str], finished: Sequence[bool]) -> list[float]:
    """1 for an answer that is nothing but digits, as every right answer of the demo is, else 0."""
    return [
        float(done and response.strip().isdigit()) for response, done in zip(responses, finished, strict=True)
    ]
