"""Reads the cells of a row that verifiers compare with answers. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def cell(row: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column, or None if the row lacks it. For `a.b`, if there is no such column,
    returns the key b of column a, which may be JSON."""
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


def known_formula(row: Mapping[str, Any], column: str) -> str:
    """Returns a row's right answer as text. Raises ValueError when the row has no answer, or an answer with
    unbalanced braces, which no response could equal."""
    known = known_answer(row, column)
    depth = 0
    for found in re.findall(r"\\.|[{}]", known):
        depth += {"{": 1, "}": -1}.get(found, 0)
        if depth < 0:
            break
    if depth:
        raise ValueError(f"column {column!r} holds {known!r:.60}, whose braces do not pair")
    return known


def known_entry(row: Mapping[str, Any], column: str) -> str:
    """Returns the data needed to score an answer to a generated question. Raises ValueError when the row has
    none."""
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise ValueError(f"it is not of a data source {column}, whose answers it scores")
    return value
