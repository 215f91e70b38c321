"""Values of flags as the fields of a recipe want them. ValueError says why one does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable

Words = tuple[str, ...]


def number(words: Words) -> float:
    if len(words) != 1:
        raise ValueError("one number is expected" if words else "it has no value")
    if "$" in words[0] or "`" in words[0]:
        raise ValueError("the script does not say what this variable holds")
    try:
        value = float(words[0])
    except ValueError:
        raise ValueError("this is not a number") from None
    if not math.isfinite(value):
        raise ValueError("this is not a finite number")
    return value


def whole(words: Words) -> int:
    """Also 1e8, as the dialects allow it."""
    value = number(words)
    if value != int(value):
        raise ValueError("this is not a whole number")
    return int(value)


def count(words: Words) -> int:
    value = whole(words)
    if value < 1:
        raise ValueError("this is not above 0")
    return value


def off_or_number(words: Words) -> int:
    """-1 switches off, which is 0 here."""
    return max(0, whole(words))


def fraction(words: Words) -> float:
    value = number(words)
    if not 0 <= value <= 1:
        raise ValueError("this is not between 0 and 1")
    return value


def pair(words: Words) -> list[float]:
    if len(words) != 2:
        raise ValueError("two numbers are expected")
    return [number(words[:1]), number(words[1:])]


def rest_of(read: Callable[[Words], int], told: str, fits: Callable[[int], bool]) -> Callable[[Words], int]:
    """`read`, for values that also fit."""

    def checked(words: Words) -> int:
        value = read(words)
        if not fits(value):
            raise ValueError(f"only {told} is known")
        return value

    return checked


def listed(words: Words) -> list[str]:
    """`a,b` or `a b` as a list."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]
