"""Determines which of the stage's teachers each prompt's row names. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

TEACHER = "teacher"  # the column


def teacher_problem(teachers: Collection[str], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a message about the first row that names a teacher the stage does not have; "" if there is no
    such row, or the stage has no teachers. `rows`: pairs of a row's place and the row."""
    for where, row in rows if teachers else ():
        name = row.get(TEACHER)
        if name is None or (isinstance(name, str) and name in teachers):
            continue
        near = difflib.get_close_matches(str(name), teachers, 1)
        do = f"did you mean {near[0]}?" if near else f"write one of {', '.join(teachers)}, or leave it out"
        return f"{where}: the row names the teacher {name!r}, which the stage does not have: {do}"
    return ""


def require_teachers(teachers: Collection[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError if a prompt's row names a teacher that the stage does not have."""
    problem = teacher_problem(teachers, ((f"prompts: number {i}", row) for i, row in enumerate(rows, 1)))
    if problem:
        raise ValueError(problem)


def places_by_teacher(teachers: Collection[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns the indices of the rows that name each teacher, in order; rows without a name are under "". A
    teacher that no row names has no entry."""
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        name = row.get(TEACHER) if teachers else None
        places.setdefault(name or "", []).append(i)
    return places
