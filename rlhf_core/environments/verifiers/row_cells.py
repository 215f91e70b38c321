"""Reads the cells of rows that verifiers compare answers with. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column; of `a.b`, if there is no such column, the key b in column a, which may
    be JSON. None if there is none."""
    if column in row or "." not in column:
        return row.get(column)
    name, _, rest = column.partition(".")
    inner = row.get(name)
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError:
            return None
    return cell(inner, rest) if isinstance(inner, Mapping) else None


def known_answer(row: Mapping[str, Any], column: str) -> str:
    """Returns a row's right answer as text. Raises ValueError when the row has none."""
    value = cell(row, column)
    if isinstance(value, float):
        value = format(Decimal(repr(value)), "f")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"column {column!r} holds no text or number but {value!r:.60}")
    if not str(value).strip():
        raise ValueError(f"column {column!r} is empty")
    return str(value)
