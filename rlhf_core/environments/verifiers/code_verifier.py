"""`reward: code`: runs the last Python code block of a response against the row's tests, in a sandbox.

The reward is 1 if all tests pass, otherwise 0; with `partial`, the reward is the fraction of tests that pass.
A test that exceeds a limit on CPU time or memory has failed; if it exceeds the time limit, the remaining
tests count as failed too. An answer has no reward if the sandbox itself fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.environments import sandbox
from rlhf_core.environments.verifiers.code_tests import CodeTests, known_tests

ALL_TESTS = 10  # all tests of an answer together may take this many times the limit of one test
WAITING = 4  # tests may take this many times their CPU limit in wall-clock time, on a busy machine
START_SECONDS = 30.0  # wall-clock limit for the sandbox and Python to start
START_CPU = 1.0  # CPU seconds for them to start
LONGEST_CODE = 100_000  # bytes; Linux limits an argument to 128 KiB
LONGEST_LINE = 16 << 20  # bytes of the arguments or result of one call
SPARE_OUTPUT = 4096  # bytes that a program may print beyond twice the expected output
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$")
TAGS = {"python": ("python", "py", "python3")}
SIDES = Path(__file__).with_name("call_sides.py")
PROGRAM = """
import sys
sys.stdout.write('{"ready": true}\\n')
sys.stdout.flush()
exec(compile(sys.argv.pop(), "answer.py", "exec"), {"__name__": "__main__"})
"""


class SandboxFailed(Exception):
    """Raised when no program can be started in the sandbox, regardless of its code."""


def verify_answers(
    responses: Sequence[str],
    rows: Sequence[dict[str, Any]],
    finished: Sequence[bool],
    column: str = "tests",
    language: str = "python",
    seconds: float = 10.0,
    memory_mib: int = 512,
    partial: bool = False,
    mode: str = "bubblewrap",
) -> list[float | None]:
    """Returns the rewards of responses, None where the sandbox failed. Raises ValueError when a row has no
    tests, and SandboxFailed when the sandbox failed for all responses."""
    os.environ[sandbox.MODE] = mode
    rewards: list[float | None] = []
    failure = ""
    for response, row, whole in zip(responses, rows, finished, strict=True):
        tests = known_tests(row, column)
        code = last_block(response, TAGS[language]) if whole else None
        if code is None or not can_run(code):
            rewards.append(0.0)
            continue
        try:
            passed = asyncio.run(passed_tests(code, tests, seconds, memory_mib, all_or_nothing=not partial))
        except (SandboxFailed, OSError, RuntimeError) as error:
            failure = f"the sandbox failed: {error}"
            print(failure, file=sys.stderr, flush=True)
            rewards.append(None)
            continue
        rewards.append(passed / len(tests) if partial else float(passed == len(tests)))
    if failure and all(reward is None for reward in rewards):
        raise SandboxFailed(failure)
    return rewards


def last_block(text: str, tags: Sequence[str]) -> str | None:
    """Returns the last closed fenced code block that has one of these tags, or else the last one without a
    tag; None if there is neither."""
    tagged: str | None = None
    untagged: str | None = None
    fence = tag = ""
    lines: list[str] = []
    for line in text.split("\n"):
        match = FENCE.match(line)
        if not fence and match:
            fence, tag = match[1], match[2].lower()
            lines = []
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            block = "\n".join(lines)
            tagged = block if tag in tags else tagged
            untagged = block if not tag else untagged
            fence = ""
        else:
            lines.append(line)
    return untagged if tagged is None else tagged


def can_run(code: str) -> bool:
    """Returns whether code can be passed to Python at all."""
    return bool(code.strip()) and "\0" not in code and len(code.encode(errors="replace")) <= LONGEST_CODE


async def passed_tests(
    code: str, tests: CodeTests, seconds: float, memory_mib: int, all_or_nothing: bool
) -> int:
    """Returns the number of tests that the code passes; with `all_or_nothing`, stops at the first failure.
    `seconds`: limit on the CPU time of one test. Raises SandboxFailed, OSError or RuntimeError when the
    sandbox fails."""
    if tests.programs:
        return await _programs(code, tests, seconds, memory_mib, all_or_nothing)
    command = [*sandbox.python()[:-1], "-c", SIDES.read_text()]
    limits = ALL_TESTS * seconds + START_CPU, memory_mib, False, LONGEST_LINE
    async with (
        sandbox.opened([*command, "answer"], *limits) as answer,
        sandbox.opened([*command, "tests"], *limits) as checker,
    ):
        await _start(answer, memory_mib)
        await _start(checker, memory_mib)
        try:
            await _send(answer, {"seconds": seconds}, START_SECONDS)
            await _send(answer, {"code": code}, START_SECONDS)
            loaded = await _line(answer, WAITING * seconds)
        except TimeoutError:
            return 0
        if loaded.strip() != b'{"loaded": true}':
            return 0
        await _send(checker, {"checks": tests.checks, "names": tests.names}, START_SECONDS)
        return await _checks(answer, checker, len(tests.checks), seconds, all_or_nothing)


async def _programs(
    code: str, tests: CodeTests, seconds: float, memory_mib: int, all_or_nothing: bool
) -> int:
    """Runs the code as a program on each test's input and compares its output."""
    passed = 0
    spent = 0.0  # CPU seconds
    end = time.monotonic() + WAITING * ALL_TESTS * seconds
    command = [*sandbox.python()[:-1], "-c", PROGRAM, code.encode(errors="replace").decode()]
    for given, known in tests.programs:
        before = _children_seconds()
        most = 2 * len(known.encode(errors="replace")) + SPARE_OUTPUT
        async with sandbox.opened(command, seconds + START_CPU, memory_mib, False) as process:
            await _start(process, memory_mib)
            output = await sandbox.output_of(process, given, WAITING * seconds, most)
        took = _children_seconds() - before
        spent += took - START_CPU
        right = output.code == 0 and same_output(output.text, known)
        passed += right
        late = output.code is None or (not right and took > seconds)
        if late or (all_or_nothing and not right) or spent > ALL_TESTS * seconds or time.monotonic() > end:
            break
    return passed


def _children_seconds() -> float:
    """Returns the CPU time of the child programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _checks(answer: Process, checker: Process, count: int, seconds: float, all_or_nothing: bool) -> int:
    """Passes calls and results between the two programs and counts the checks that pass."""
    passed = 0
    deadline = time.monotonic() + WAITING * ALL_TESTS * seconds
    end = time.monotonic() + WAITING * seconds
    results = 0
    while results < count:
        try:
            line = await _line(checker, end - time.monotonic())
            if line and not line.startswith(b'{"passed"'):
                await _answer_call(answer, checker, line, end)
                continue
        except TimeoutError:
            break
        if not line:
            break
        passed += line.strip() == b'{"passed": true}'
        results += 1
        end = min(deadline, time.monotonic() + WAITING * seconds)
        if all_or_nothing and passed < results:
            break
    return passed


async def _answer_call(answer: Process, checker: Process, line: bytes, end: float) -> None:
    """Forwards a call, or the result of one, to the program with the answer, and the reply to the program
    with the tests. Raises TimeoutError when no reply arrives in time, or the answer's process has ended or
    written too much."""
    await _send_line(answer, line, end - time.monotonic())
    reply = await _line(answer, end - time.monotonic())
    if not reply:
        raise TimeoutError
    await _send_line(checker, reply, end - time.monotonic())


async def _start(process: Process, memory_mib: int) -> None:
    """Waits until a program is running. Raises SandboxFailed if it does not start."""
    try:
        line = await _line(process, START_SECONDS)
    except TimeoutError:
        line = b""
    if line.strip() != b'{"ready": true}':
        raise SandboxFailed(f"Python did not start with {memory_mib} MiB")


async def _line(process: Process, seconds: float) -> bytes:
    """Returns the next line from a program, without inner line breaks; b"" if the program ended or wrote too
    much. Raises TimeoutError after `seconds`."""
    assert process.stdout is not None
    try:
        return await asyncio.wait_for(process.stdout.readline(), max(seconds, 0.001))
    except ValueError:  # longer than LONGEST_LINE
        return b""


async def _send(process: Process, message: Any, seconds: float) -> None:
    await _send_line(process, json.dumps(message).encode() + b"\n", seconds)


async def _send_line(process: Process, line: bytes, seconds: float) -> None:
    """Sends a line. Raises TimeoutError when the program does not read it."""
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(line)
        await asyncio.wait_for(process.stdin.drain(), max(seconds, 0.001))


def same_output(printed: str, known: str) -> bool:
    """Returns whether a program printed the expected output. Compares line by line, ignoring whitespace
    around lines and empty lines at the end. Numbers with a decimal point may differ by rounding."""
    lines = [line.strip() for line in printed.rstrip().split("\n")]
    others = [line.strip() for line in known.rstrip().split("\n")]
    if lines == others:
        return True
    if len(lines) != len(others):
        return False
    pairs = [(one.split(), other.split()) for one, other in zip(lines, others, strict=True)]
    return all(len(one) == len(other) and all(map(_same_word, one, other)) for one, other in pairs)


def _same_word(said: str, known: str) -> bool:
    if said == known:
        return True
    if "." not in known:
        return False
    try:
        one, other = float(said), float(known)
    except ValueError:
        return False
    return abs(one - other) <= 1e-6 * max(1.0, abs(other))
