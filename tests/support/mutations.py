"""Changes values at random, for property tests of what users write."""

from __future__ import annotations

from typing import Any

from rlhf_core.system.processes import raised_by_us


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each container of a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def require_sentence(error: ValueError) -> None:
    """Checks that an error is the project's own, with a sentence in each line."""
    assert raised_by_us(error), f"{type(error).__name__} of a library: {error}"
    lines = str(error).splitlines()
    assert lines and all(line.strip() for line in lines) and "errors.pydantic.dev" not in str(error), error
