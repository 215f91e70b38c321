"""Reads a curriculum's column of pass rates that are known before the run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def pass_rate_problem(key: str | None, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a sentence about the first row whose column `key` is not a pass rate, or about the column if no
    row has it. Each row comes with its place. Returns "" if there is no problem or no `key`."""
    if key is None:
        return ""
    has_column = False
    for where, row in rows:
        value = row.get(key)
        has_column = has_column or key in row
        if value is not None and not _is_rate(value):
            return f"{where}: {key} is {value!r}, and a pass rate is from 0 to 1, or null: correct it"
    if not has_column:
        return f"curriculum.pass_rate_key: no row has the column {key!r}: correct the name, or leave it out"
    return ""


def pass_rates(key: str | None, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> np.ndarray:
    """Returns the pass rate of each row, (N,), nan where it is not known. Raises ValueError, with the message
    of `pass_rate_problem`, if there is a problem."""
    known = list(rows)
    problem = pass_rate_problem(key, known)
    if problem:
        raise ValueError(problem)
    values = [None if key is None else row.get(key) for _, row in known]
    return np.array([np.nan if value is None else float(value) for value in values], dtype=np.float64)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
