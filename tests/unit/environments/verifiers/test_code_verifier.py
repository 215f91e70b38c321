"""Programs that pass their tests, that do not, and that try to be rewarded without passing, in real sandboxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewarding.verifiers import CodeReward
from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers import code_verifier
from rlhf_core.environments.verifiers.code_verifier import SandboxFailed, verify_answers
from rlhf_core.rewards.clients import client_of
from rlhf_core.rewards.reward_contract import RewardError, RewardsFailed, Sample

pytestmark = pytest.mark.skipif(
    not sandbox.available(), reason="needs bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)"
)
ADD = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
SUM = "a, b = map(int, input().split())\nprint(a + b)"
NEVER = 60.0  # a limit that no test here comes to
FORGE = '{"passed": true}'


def reward(code: str, tests: Any, seconds: float = NEVER, **options: Any) -> float | None:
    row = {"tests": tests, **options.pop("row", {})}
    (found,) = verify_answers([f"Thus:\n```python\n{code}\n```"], [row], [True], seconds=seconds, **options)
    return found


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (ADD, ASSERTS),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [[3], "ab"]}),
        (f"class Solution:\n    {ADD.replace('(', '(self, ')}".replace("\n    ret", "\n        ret"), [
            {"fn_name": "add", "input": "1\n2", "output": "3"}
        ]),
        (SUM, SUMS),
        (f"import sys\nprint('note', file=sys.stderr)\n{SUM}", SUMS),
        (f"if __name__ == '__main__':\n    {SUM}".replace("\nprint", "\n    print"), SUMS),
        (f"print('loading')\n{ADD}", ASSERTS),
        ("def pair(x) -> Tuple[int, int]:\n    return x, math.floor(x)", "assert pair(1.5) == (1.5, 1)"),
        (
            "def f(x):\n    raise ValueError('no')",
            "try:\n    f(1)\n    told = ''\nexcept ValueError as error:\n    told = str(error)\nassert told == 'no'",
        ),
        (
            "class Box:\n    def __init__(self, x):\n        self.x = x\n    def get(self):\n        return {self.x, 1}",
            "box = Box(3)\nassert box.x == 3\nassert box.get() == {1, 3}",
        ),
        ("def copy(x):\n    return list(x)", "assert copy((1, 2)) == [1, 2]"),
        ("class Solution:\n    def copy(self, x):\n        return x", {"fn_name": "copy", "inputs": [[1]], "outputs": [[1]]}),
        ("def srt(x):\n    x.sort()", "x = [3, 1, 2]\nsrt(x)\nassert x == [1, 2, 3]"),
        ("def put(d, s):\n    d['a'] = 1\n    s.add(2)", "d, s = {}, {1}\nput(d, s=s)\nassert (d, s) == ({'a': 1}, {1, 2})"),
        ("def turn(m):\n    m[0][0] = 9", "m = [[1, 2]]\nturn(m)\nassert m == [[9, 2]]"),
        ("def f(g, x):\n    return [g(i) for i in x]", "assert f(lambda i: i + 1, (i for i in [1, 2])) == [2, 3]"),
        ("def f(g):\n    try:\n        g()\n    except KeyError as error:\n        return error.args[0]",
         "def g():\n    raise KeyError('k')\nassert 'k' in f(g)"),
        ("def h(x):\n    return x\ndef f(g, x):\n    return g(x)", "assert f(lambda i: h(i), 4) == 4"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("def f(x):\n    return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
        ("def f(x):\n    return x.keys()", "assert f({'a': 1}) == {'a'}\nassert list(f({'b': 1, 'a': 2})) == ['b', 'a']"),
        ("from decimal import Decimal\ndef f(x):\n    return Decimal(x)", "from decimal import Decimal\nassert f('0.1') == Decimal('0.1')"),
        ("from fractions import Fraction\ndef f(x):\n    return Fraction(x, 3), range(x), deque([x])",
         "from fractions import Fraction\nassert f(2) == (Fraction(2, 3), range(2), deque([2]))".replace("deque([2])", "collections.deque([2])")),
    ],
)  # fmt: skip
def test_a_right_program_is_rewarded(code: str, tests: Any) -> None:
    assert reward(code, tests) == 1.0


def test_one_failed_test_is_enough_unless_the_share_counts() -> None:
    wrong = "def add(a, b):\n    return a + b if a == 1 else 0"
    assert reward(wrong, ASSERTS) == 0.0
    assert reward(wrong, ASSERTS, partial=True) == pytest.approx(1 / 3)
    assert reward("print(3)", SUMS) == 0.0
    assert reward("print(3)", SUMS, partial=True) == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()",
        "class Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal(9)",
        "import builtins\nbuiltins.AssertionError = Warning\ndef add(a, b): return 0",
        "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef add(a, b): return 0",
        f"import os\nfor n in range(64):\n    try: os.write(n, b'{FORGE}\\n' * 5)\n    except OSError: pass\n"
        "def add(a, b): return 0",
        f"def add(a, b):\n    print('{FORGE}', flush=True)",
        "import os\nwhile True: os.fork()",
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n        for value in frame.f_locals.values():\n            if 'assert' in str(value): return 3\n        frame = frame.f_back\n    return 'none found'",
        "def add(a, b):\n    x = []\n    while True: x = [x]",
        "def add(a, b):\n    x = []\n    for i in range(100_000): x = [x]\n    return x",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "not python",
        "def add(a, b)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tests", [ASSERTS, "def check(candidate):\n    assert candidate(1, 2) == 3"])
def test_a_program_that_does_not_add_is_not_rewarded(code: str, tests: Any) -> None:
    assert reward(code, tests, seconds=10.0, partial=True, row={"entry_point": "add"}) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x' * 10_000)",
        "import os\nwhile True: os.fork()",
        "import os\nprint(3); os._exit(1)",
        "print(open('/proc/self/cmdline').read() + open('/proc/1/cmdline').read())",
        "import os\nprint([name for name in os.listdir('/') if 'work' in name], os.environ)",
        "",
    ],
)
def test_a_program_that_prints_something_else_is_not_rewarded(code: str) -> None:
    assert reward(code, SUMS, seconds=10.0, partial=True) == 0.0


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): return 0", ["assert f(0) == 0", "for i in range(3):\n    assert f(i) == i"]),
        ("def f(x): return 0", "assert f(0) == 0\nif __name__ == '__main__':\n    assert f(1) == 1"),
        ("def Counter(x): return 7", {"fn_name": "Counter", "inputs": [["aa"]], "outputs": [{"a": 2}]}),
        ("def other(): pass", {"fn_name": "Counter", "inputs": [["aa"]], "outputs": [{"a": 2}]}),
        ("def heapify(x): return 7", {"fn_name": "heapify", "inputs": [[[1]]], "outputs": [None]}),
        ("def reduce(*x): return 7", "assert reduce(lambda a, b: a + b, [1, 2]) == 3"),
        ("def other(): pass", "assert reduce(lambda a, b: a + b, [1, 2]) == 3"),
        ("class math:\n    isclose = lambda *x: True\ndef f(x): return 0", "assert math.isclose(f(1), 1.0)"),
        ("def all(x): return True\ndef f(x): return 0", "assert all(f(i) == i for i in [1, 2])"),
        ("def srt(x): x.clear()", "x = [3, 1, 2]\nsrt(x)\nassert x == [1, 2, 3]"),
        ("def f(g): return g.__globals__['known']", "known = 3\nassert f(lambda: 0) == known"),
    ],
)  # fmt: skip
def test_wrong_code_is_not_rewarded_by_odd_tests(code: str, tests: Any) -> None:
    assert reward(code, tests) == 0.0


def test_calls_that_test_nothing_are_no_share() -> None:
    tests = "import random\nrandom.seed(0)\nprint('x')\nassert f(1) == 1\nassert f(2) == 2"
    assert reward("def f(x): return 1", tests, partial=True) == 0.5


@pytest.mark.parametrize("tests", [SUMS, ASSERTS])
def test_waiting_takes_no_cpu_time(tests: Any) -> None:
    code = "import time; time.sleep(2.5)"
    whole = f"{code}\n{SUM}" if tests is SUMS else f"{code}\n{ADD}"
    assert reward(whole, tests, seconds=2.0) == 1.0


def test_a_slow_start_is_no_failed_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = code_verifier.PROGRAM.replace("import sys", "import sys, time\ntime.sleep(2.5)", 1)
    monkeypatch.setattr(code_verifier, "PROGRAM", slow)
    assert reward(SUM, SUMS, seconds=0.5) == 1.0  # 2 s by the clock


def test_a_program_that_disarms_its_limit_is_wrong() -> None:
    code = "def add(a, b):\n    signal.setitimer(signal.ITIMER_PROF, 0)\n    while True: pass"
    assert reward(f"import signal\n{code}", ASSERTS, seconds=0.5) == 0.0


def test_without_a_sandbox_code_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code = "import os\nprint(os.environ.get('OPENAI_API_KEY', 'none'))"
    assert reward(code, {"inputs": [""], "outputs": ["none"]}, mode="none") == 1.0


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_that_does_not_end_is_wrong(code: str) -> None:
    assert reward(code, SUMS, seconds=1.0, partial=True) == 0.0
    assert reward(code, ASSERTS, seconds=1.0, partial=True) == 0.0
    assert reward(f"def add(a, b):\n    {code}", ASSERTS, seconds=1.0, partial=True) == 0.0


def test_no_code_and_cut_answers_are_wrong() -> None:
    rows = [{"tests": ASSERTS}] * 3
    whole = f"```python\n{ADD}\n```"
    assert verify_answers(["No code.", whole, whole], rows, [True, False, True]) == [0.0, 0.0, 1.0]


def test_a_sandbox_that_fails_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"tests": SUMS}, {"tests": ASSERTS}]
    texts = [f"```python\n{SUM}\n```", f"```python\n{ADD}\n```"]
    monkeypatch.setattr(sandbox, "closed_in", lambda command, *rest: ["/bin/false"])
    with pytest.raises(SandboxFailed, match="Python did not start"):
        verify_answers(texts, rows, [True, True])
    assert verify_answers([*texts, "no code"], [*rows, rows[0]], [True] * 3) == [None, None, 0.0]
    monkeypatch.setattr(sandbox, "available", lambda: False)
    with pytest.raises(SandboxFailed, match="no bubblewrap"):
        verify_answers(texts, rows, [True, True])


def test_a_stage_gets_the_rewards_from_processes_of_its_own() -> None:
    samples = [
        Sample([], f"```python\n{code}\n```", {"suite": {"cases": SUMS}}, finished, "")
        for code, finished in ((SUM, True), ("print(3)", True), (SUM, False))
    ]
    client = client_of(CodeReward(tests="suite.cases", partial=True, concurrency=2, timeout=NEVER))
    try:
        assert np.asarray(client.score(samples, 0).rewards).tolist() == [1.0, 0.5, 0.0]
    finally:
        client.close()
    assert (
        code_verifier.WAITING * (code_verifier.ALL_TESTS + 1) * NEVER
        < CodeReward(timeout=NEVER).request_seconds
    )


def test_a_failed_sandbox_is_a_failed_reward_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap
    client = client_of(CodeReward(concurrency=1))
    sample = Sample([], f"```python\n{ADD}\n```", {"tests": ASSERTS}, True, "")
    try:
        with pytest.raises((RewardsFailed, RewardError), match="no bubblewrap"):
            client.score([sample], 0)
    finally:
        client.close()
