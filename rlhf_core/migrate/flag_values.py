"""Converts the words of a flag to a value. All readers raise ValueError, with the reason, if the words do not
fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", int, float)
Words = tuple[str, ...]


def number(words: Words) -> float:
    """Reads a finite number."""
    if len(words) != 1:
        raise ValueError("one number is expected" if words else "it has no value")
    if "$" in words[0] or "`" in words[0]:
        raise ValueError("only a shell knows this value: write the number into the recipe")
    try:
        value = float(words[0])
    except ValueError:
        raise ValueError("this is not a number") from None
    if not math.isfinite(value):
        raise ValueError("this is not a finite number")
    return value


def whole(words: Words) -> int:
    """Reads a whole number, including forms like 1e8, which the dialects allow."""
    value = number(words)
    if value != int(value):
        raise ValueError("this is not a whole number")
    return int(value)


def off_or_number(words: Words) -> int:
    """Reads a whole number; -1, which means off, becomes 0."""
    return max(0, whole(words))


def within(read: Callable[[Words], T], low: float, high: float, error: str) -> Callable[[Words], T]:
    """Returns a version of `read` that raises ValueError with `error` for values outside [low, high]."""

    def limited(words: Words) -> T:
        value = read(words)
        if not low <= value <= high:
            raise ValueError(error)
        return value

    return limited


count = within(whole, 1, math.inf, "this is not above 0")
fraction = within(number, 0, 1, "this is not between 0 and 1")
zero_stage = within(whole, 0, 3, "only 0 to 3 is known")


def pair(words: Words) -> list[float]:
    """Reads two numbers."""
    if len(words) != 2:
        raise ValueError("two numbers are expected")
    return [number(words[:1]), number(words[1:])]


def listed(words: Words) -> list[str]:
    """Reads `a,b` or `a b` as a list."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


def true(words: Words) -> bool:
    """Reads a switch; `--flag False` turns it off."""
    return not words or words[0].lower() not in ("false", "0", "no")


def one_of(**values: str) -> Callable[[Words], str]:
    """Returns a reader that maps one of the names in `values` to its value."""

    def read(words: Words) -> str:
        if len(words) != 1 or words[0].lower() not in values:
            raise ValueError(f"only {', '.join(values)} are known")
        return values[words[0].lower()]

    return read
