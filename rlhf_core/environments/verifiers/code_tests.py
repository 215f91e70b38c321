"""Reads a row's tests, in the forms used by published data sets.

- Python code with asserts, as a string or a list of strings (MBPP), with a function `check(candidate)` and
  the column `entry_point` (HumanEval), or with functions `test_...`.
- `{"inputs": [...], "outputs": [...]}`, possibly as JSON (APPS, TACO, verl): the input and output of a
  program or, with `fn_name`, the arguments and results of that function.
- A list of `{"input": ..., "output": ...}` (PrimeIntellect, DeepCoder), with or without `fn_name`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any, NamedTuple

from rlhf_core.environments.verifiers.python_tests import checks_of
from rlhf_core.environments.verifiers.row_cells import cell

OWN = {"_same", "_found"}  # names used by the checks of calls


class CodeTests(NamedTuple):
    """A row's tests: either `checks` or `programs`. `checks` are pieces of Python code that run one after
    another, each of which raises if its test fails; `names` are the names of the answer that they use.
    `programs` are pairs of input and expected output."""

    checks: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.checks) + len(self.programs)


def known_tests(row: Mapping[str, Any], column: str) -> CodeTests:
    """Returns a row's tests. Raises ValueError when it has none, or when their form is unknown."""
    value = cell(row, column)
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            pass  # Python code may also start like this
    try:
        found = _tests(value, row.get("entry_point"))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"column {column!r} holds tests that are no Python code ({error})") from None
    except ValueError as error:
        raise ValueError(f"column {column!r} holds {error}") from None
    if len(found) == 0:
        raise ValueError(f"column {column!r} holds no tests")
    return found


def _tests(value: Any, entry: Any) -> CodeTests:
    if isinstance(value, str):
        return CodeTests(*checks_of(value, entry))
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return CodeTests(*checks_of("\n".join(value), entry))
    if isinstance(value, dict):
        value = [value] if "input" in value else _paired(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError(f"neither code, nor inputs and outputs, but {value!r:.60}")
    if any("input" not in part or "output" not in part for part in value):
        raise ValueError("a test without input or output")
    calls = [part for part in value if part.get("fn_name")]
    if calls and len(calls) < len(value):
        raise ValueError("tests of which some have fn_name and some do not")
    if not calls:
        return CodeTests(programs=tuple((_lines(part["input"]), _lines(part["output"])) for part in value))
    checks = [_call(str(part["fn_name"]), part["input"], part["output"]) for part in calls]
    return CodeTests(tuple(checks), tuple({str(part["fn_name"]): None for part in calls}))


def _paired(value: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("a mapping without the lists inputs and outputs of one length")
    name = value.get("fn_name")
    return [
        {"input": given, "output": known, "fn_name": name}
        for given, known in zip(inputs, outputs, strict=True)
    ]


def _lines(value: Any) -> str:
    """Returns a program's input or output, given as a string or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, given: Any, known: Any) -> str:
    """Returns the code that checks one call. As in APPS, a result may be wrapped in a list, and arguments
    given as a string are JSON, one per line."""
    if not name.isidentifier() or iskeyword(name) or name in OWN:
        raise ValueError(f"fn_name {name!r:.60}, which is no name of a function")
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        known = json.loads(known) if isinstance(known, str) else known
    if not isinstance(given, list):
        raise ValueError(f"arguments that are no list but {given!r:.60}")
    return f"_found = {name}(*{given!r})\nassert _same(_found, {known!r}) or _same([_found], {known!r})"
