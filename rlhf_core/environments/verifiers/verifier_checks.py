"""Checks, before any work starts, that this machine can run a stage's verifiers and that rows have the
columns that the verifiers read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.config.rewarding.verifiers import MathReward, ReasoningGymReward, Verifier
from rlhf_core.config.rewards import RewardSource
from rlhf_core.data.documents import Prompt
from rlhf_core.data.rows.reasoning_gym_rows import MISSING, installed_release
from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers.code_tests import known_tests
from rlhf_core.environments.verifiers.row_cells import known_entry, known_formula

READERS: dict[str, Callable[[Mapping[str, Any], str], object]] = {
    "math": known_formula,
    "code": known_tests,
    "reasoning_gym": known_entry,
}


def verifiers_of(sources: Sequence[RewardSource]) -> list[Verifier]:
    """Returns the verifiers among reward sources."""
    return [source for source in sources if isinstance(source, Verifier)]


def lacks(source: Verifier) -> str:
    """Returns what this machine lacks for a verifier and how to fix it, without naming the place in the
    recipe; "" if nothing is missing."""
    if source.shipped == "math" and importlib.util.find_spec("math_verify") is None:
        return "needs the package math-verify, which is not installed: pip install 'math-verify[antlr4_13_2]'"
    if isinstance(source, ReasoningGymReward) and not installed_release():
        return MISSING
    if isinstance(source, MathReward):
        return ""
    if source.sandbox == "bubblewrap" and not sandbox.available():
        return (
            "runs programs in bubblewrap (bwrap), which does not work on this machine; install it (Debian,"
            " Ubuntu: apt-get install bubblewrap), or set its sandbox to none, which closes nothing in"
        )
    return ""


def row_problem(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a message about the first row in which a verifier cannot read its column; "" if there is none.
    `rows`: pairs of a row's place and the row."""
    verifiers = verifiers_of(sources)
    for where, row in rows if verifiers else ():
        for source in verifiers:
            try:
                READERS[source.shipped](row, source.column)
            except ValueError as error:
                columns = ", ".join(row)
                do = "correct the row"
                if source.column_field:
                    do += f", or name another column in {source.column_field}"
                return (
                    f"{where}: the verifier {source.title} cannot read this row: {error}; its columns are"
                    f" {columns}: {do}"
                )
    return ""


def require_verifiable(
    sources: Sequence[RewardSource], prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt] = ()
) -> None:
    """Raises ValueError when this machine lacks something a verifier needs, or a row of the prompts lacks a
    value it reads."""
    for source in verifiers_of(sources):
        told = lacks(source)
        if told:
            raise ValueError(f"the reward {source.title} {told}")
    for field, given in (("prompts", prompts), ("eval_prompts", eval_prompts)):
        rows = ((f"{field}: number {i}", prompt.row) for i, prompt in enumerate(given, 1))
        problem = row_problem(sources, rows)
        if problem:
            raise ValueError(problem)
