"""Determines which environment each row names, if a stage has several environments."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.data.documents import Prompt

ENVIRONMENT = "environment"  # the column


def environment_problem(environments: Collection[str], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a message about the first row that does not name one of the environments; "" if there is no
    such row, or if the stage's environments have no names. `rows`: pairs of a row's place and the row."""
    for where, row in rows if environments else ():
        name = row.get(ENVIRONMENT)
        if isinstance(name, str) and name in environments:
            continue
        if name is None:
            told = f"the row names no environment: write one of {', '.join(environments)} into its column"
            return f"{where}: {told} {ENVIRONMENT!r}"
        near = difflib.get_close_matches(str(name), environments, 1)
        do = f"did you mean {near[0]}?" if near else f"write one of {', '.join(environments)}"
        return f"{where}: the row names the environment {name!r}, which the stage does not have: {do}"
    return ""


def require_environments(
    environments: Collection[str], prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt] = ()
) -> None:
    """Raises ValueError if a row of the prompts does not name one of the environments."""
    for field, given in (("prompts", prompts), ("eval_prompts", eval_prompts)):
        rows = ((f"{field}: number {i}", prompt.row) for i, prompt in enumerate(given, 1))
        problem = environment_problem(environments, rows)
        if problem:
            raise ValueError(problem)
