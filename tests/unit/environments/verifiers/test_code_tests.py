"""The forms of tests that published data sets have, and what is said of others; blocks of code in responses; and
output that counts as equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_core.environments.verifiers.code_tests import CodeTests, known_tests
from rlhf_core.environments.verifiers.code_verifier import TAGS, can_run, last_block, same_output

PROGRAMS = CodeTests(programs=(("1 2\n", "3\n"), ("3 4\n", "7\n")))


@pytest.mark.parametrize(
    "cell",
    [
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
        json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"], "fn_name": None},
        [
            {"type": "stdin_stdout", "fn_name": None, "input": "1 2\n", "output": "3\n"},
            {"input": "3 4\n", "output": "7\n"},
        ],
    ],
)
def test_inputs_and_outputs_of_programs(cell: Any) -> None:
    assert known_tests({"tests": cell}, "tests") == PROGRAMS


def test_lists_of_lines_are_joined() -> None:
    cell = {"inputs": [["1", "2"]], "outputs": [["3"]]}
    assert known_tests({"tests": cell}, "tests").programs == (("1\n2", "3"),)


def test_a_function_by_name_has_a_check_for_each_call() -> None:
    found = known_tests({"t": {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[3], 4]}}, "t")
    assert found.names == ("f",) and len(found) == 2 and "f(*[1, 'a'])" in found.checks[0]
    one = known_tests({"t": [{"fn_name": "f", "input": '[1, 2]\n"a"', "output": "true"}]}, "t")
    assert "f(*[[1, 2], 'a'])" in one.checks[0] and "True" in one.checks[0]


@pytest.mark.parametrize(
    ("cell", "row", "count", "names"),
    [
        (["assert f(1) == 2", "assert f(2) == 3"], {}, 2, ("f",)),
        ("x = f(1)\nassert x == 2\nx = g(x)\nassert x == 5", {}, 2, ("f", "g")),
        ("[x] = f(1)\nassert x", {}, 1, ("f",)),
        ("def check(candidate):\n    assert candidate(1) == 2\n", {"entry_point": "f"}, 1, ("f",)),
        ("def check(c):\n    assert c(1) == 2\n\ncheck(f)", {"entry_point": "f"}, 1, ("f",)),
        ("def check(c):\n    assert c(1)", {"entry_point": "Solution().f"}, 1, ("Solution",)),
        (
            "from solution import f\ndef test_a():\n    assert f(1)\n\ndef test_b():\n    assert f(2)",
            {},
            2,
            ("f",),
        ),
        ("assert f(0) == 0\nfor i in range(3):\n    assert f(i) == i", {}, 2, ("f",)),
        ("assert f(0) == 0\nif f(1) != 1:\n    raise ValueError", {}, 2, ("f",)),
        ("assert f(0) == 0\nwith g() as x:\n    assert x\nprint(f(1))", {}, 2, ("f", "g")),
        ("import random\nrandom.seed(0)\nprint('x')\nassert f(1) == 1", {}, 1, ("f",)),
        ("def same(x):\n    assert f(x) == x\n\ndef all_same():\n    same(1)\n\nall_same()", {}, 1, ("f",)),
        ("def test_it(x):\n    assert f(x)\n\ndef test_all():\n    test_it(1)", {}, 1, ("f",)),
        ("def test_it(x=1):\n    assert f(x)", {}, 1, ("f",)),
        ("if __name__ == '__main__':\n    assert f(1)", {}, 1, ("f",)),
        ("assert math.isclose(f(1), 1)\nassert sorted(f(2))", {}, 2, ("f",)),
        ("import math\nfor i in range(3):\n    pass\nassert math.isclose(f(i), max(i, 1))", {}, 1, ("f",)),
    ],
)
def test_code_is_cut_into_checks(cell: Any, row: dict[str, Any], count: int, names: tuple[str, ...]) -> None:
    found = known_tests({"tests": cell, **row}, "tests")
    assert len(found) == len(found.checks) == count
    assert found.names == names


@pytest.mark.parametrize(
    ("cell", "row", "names"),
    [
        ("assert reduce([1]) == 1", {}, ("reduce",)),
        ("from collections import Counter\nassert Counter(f('a')) == Counter('a')", {}, ("f",)),
        ("from solution import Counter, f\nassert Counter(f(1))", {}, ("Counter", "f")),
        ("from solution import max\nassert max([1]) == 1", {}, ("max",)),
        ("assert copy([1]) == f([1])", {}, ("f", "copy")),  # a module cannot be called
        ("def check(candidate):\n    assert candidate([1])", {"entry_point": "heapify"}, ("heapify",)),
        ("def check(candidate):\n    assert candidate([1])", {"entry_point": "sorted"}, ("sorted",)),
        ({"fn_name": "Counter", "inputs": [[1]], "outputs": [[1]]}, {}, ("Counter",)),
    ],
)  # fmt: skip
def test_the_tests_decide_which_standard_names_are_the_answers(
    cell: Any, row: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert known_tests({"tests": cell, **row}, "tests").names == names


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("print(f(1))", "no tests"),
        ("setup()\nx = f(1)", "no tests"),
        ("assert Counter(f(1)) == Counter([1])", "Counter, of Python or of the answer"),
        ("assert f(1)\nclass TestB:\n    def test_b(self):\n        assert f(2)", "the test class TestB"),
        ("assert f(1)\nasync def test_b():\n    assert f(2)", "the asynchronous test test_b"),
        ("assert f(1)\ndef test_b(tmp_path):\n    assert f(2)", "the test test_b with parameters"),
        ("assert f(1)\ndef extra():\n    assert f(2)", "asserts in extra, which nothing calls"),
        ("def test_a():\n    assert f(1)\n\ndef test_a():\n    assert f(2)", "two functions test_a"),
        ("import pytest\ndef test_a():\n    assert f(1)", "import pytest, which is not in"),
        ("def test_a():\n    import numpy as np\n    assert f(1)", "import numpy, which is not in"),
        ("import unittest\nassert f(1)\nunittest.main()", "that unittest runs"),
        ("from .it import f\nassert f(1)", "import .it, which is not in"),
        ("from solution import f as g\nassert g(1)", "import f under another name"),
        ("try:\n    f(1)\nexcept E:\n    assert g(2)", "the answer's E as a class"),
        ("assert isinstance(f(1), (int, Box))", "the answer's Box as a class"),
        ("x = [1]\nassert f(x) is x", "compare objects by `is`"),
        (None, "neither code, nor inputs and outputs, but None"),
        (7, "but 7"),
        ("", "no tests"),
        ([], "no tests"),
        ("x = 1", "no tests"),
        ("assert f(", "no Python code"),
        ("assert 1 == 1", "use nothing of the answer"),
        ("def check(candidate):\n    assert candidate(1)", "name the answer's function in entry_point"),
        ({"inputs": ["1"], "outputs": []}, "inputs and outputs of one length"),
        ({"inputs": "1", "outputs": "2"}, "inputs and outputs of one length"),
        ([{"input": "1"}], "without input or output"),
        ([{"input": [1], "output": 1, "fn_name": "f"}, {"input": "1", "output": "1"}], "some have fn_name"),
        ([{"input": [1], "output": 1, "fn_name": "f()"}], "no name"),
        ([{"input": [1], "output": 1, "fn_name": "_same"}], "no name"),
        ([{"input": {"a": 1}, "output": 1, "fn_name": "f"}], "no list"),
        ('{"inputs": ["1"]', "no Python code"),
        ("(" * 5000, "no Python code"),
    ],
)
def test_other_tests_are_told(cell: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        known_tests({"tests": cell}, "tests")


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("```\na\n```\nbetter:\n```py\nb\n\nc\n```\nIt prints\n```text\n3\n```", "b\n\nc"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a"),  # output, without a tag
        ("```\na\n```\n```text\n3\n```", "a"),
        ("  ```Python\n  a\n  ```", "  a"),
        ("````python\n```\na\n```\n````", "```\na\n```"),
        ("~~~python\na\n~~~", "a"),
        ("```python\na\n```\n```python\nb", "a"),  # the last one is cut
        ("use ```x``` as in\n```python\na\n```", "a"),
        ("```x``` is code", None),
        ("```java\na\n```", None),
        ("a = 1", None),
        ("", None),
        ("```" * 50_000, None),
    ],
)
def test_the_last_closed_block_of_the_language_counts(text: str, block: str | None) -> None:
    assert last_block(text, TAGS["python"]) == block


def test_some_code_cannot_be_run_at_all() -> None:
    assert can_run("a = 1") and not can_run(" \n ") and not can_run("a\0b") and not can_run("a" * 200_000)


@pytest.mark.parametrize(
    ("printed", "known", "equal"),
    [
        ("3\n", "3", True),
        ("3 \n\n", "3\n", True),
        ("1\n2\n", "1 2\n", False),
        ("0.3333333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("3.0", "3", False),
        ("nan", "1.5", False),
        ("YES", "yes", False),
        ("", "3", False),
        ("", "", True),
    ],
)
def test_output_is_compared_by_lines_and_decimals_by_value(printed: str, known: str, equal: bool) -> None:
    assert same_output(printed, known) is equal
