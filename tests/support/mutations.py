"""Changes values at random, for property tests of what users write."""

from __future__ import annotations

from typing import Any

from rlhf_core.system.processes import raised_by_us


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each container of a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def fault_of(error: ValueError) -> str:
    """Says why an error is not the project's own, with a sentence in each line; "" when it is."""
    if not raised_by_us(error):
        return f"{type(error).__name__} of a library: {error}"
    lines = str(error).splitlines()
    sound = lines and all(line.strip() for line in lines) and "errors.pydantic.dev" not in str(error)
    return "" if sound else f"no sentence in each line: {error!r}"
