"""Removes the nulls that Arrow adds to tool calls and schemas. All structs in an Arrow column have the same
fields, which are null if a row lacks them.

Only rows read by Arrow have this padding. In JSON, including JSON strings in a column, a null is a value
(`"default": null`). Torch-free.
"""

from __future__ import annotations

from typing import Any

MESSAGES = ("messages", "prompt", "chosen", "rejected")


def without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """Returns an Arrow row without null fields in `tools` and in the `tool_calls` of its messages. This also
    removes nulls that were real values."""
    found = dict(row)
    for column in MESSAGES:
        if isinstance(row.get(column), list):
            found[column] = [_message(message) for message in row[column]]
    if "tools" in row:
        found["tools"] = _without_nulls(row["tools"])
    return found


def _message(message: Any) -> Any:
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    return message | {"tool_calls": _without_nulls(message["tool_calls"])}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
