"""Programs that try to get out of the sandbox, or to take the machine down: each fails, and ends alone."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.environments import sandbox
from rlhf_core.environments.conversation import Call
from rlhf_core.environments.shipped.tools import Tools, calculate, is_right

closed = pytest.mark.skipif(
    not sandbox.available(), reason="needs bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)"
)


def run(code: str, **limits: Any) -> sandbox.Output:
    return asyncio.run(sandbox.run(sandbox.python(), code, **{"seconds": 30.0, **limits}))


@closed
def test_a_program_runs() -> None:
    assert run("print(6 * 7)") == ("42\n", 0)
    assert asyncio.run(sandbox.run(["/bin/cat"], stdin="hello")).text == "hello"
    assert run("open('/tmp/home/a', 'w').write('x'); print(open('a').read())").text == "x\n"
    assert (
        run("import threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join()").text
        == "1\n"
    )


@closed
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import subprocess; subprocess.run(['ls'])", "BlockingIOError"),
        ("import os; os.posix_spawn('/usr/bin/ls', ['ls'], {})", "BlockingIOError"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
        ("open('/usr/planted', 'w')", "Read-only"),
        ("open('/planted', 'w')", "Read-only"),
        ("open('/dev/planted', 'w')", "Read-only"),
        (
            "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/home/{n}', 'wb').write(bytes(10**8))",
            "No space left",
        ),
        ("import os; os.memfd_create('a')", "BlockingIOError"),
        (
            (
                "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.unshare(0x50000000),"
                " ctypes.get_errno())"
            ),
            "-1 11\n",
        ),
        (
            "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.setns(0, 0), ctypes.get_errno())",
            "-1 11\n",
        ),
        ("files = []\nwhile True: files.append(open('/dev/null'))", "Too many open files"),
        ("import os; os.kill(1, 9); print(os.getppid())", "1\n"),
        ("import os; os.kill(-1, 9)", "ProcessLookupError"),
    ],
)
def test_it_fails_alone(code: str, told: str) -> None:
    start = time.monotonic()
    assert told in run(code).text
    assert time.monotonic() - start < 60


@closed
def test_time_and_output_are_limited() -> None:
    start = time.monotonic()
    assert run("while True: pass", seconds=1.0).code is None
    assert run("import time; time.sleep(100)", seconds=1.0).code is None
    flooded = run("while True: print('x' * 1000)", seconds=60.0, output_bytes=5000)
    assert len(flooded.text) == 5000 and flooded.code == -9
    assert time.monotonic() - start < 50


@closed
def test_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-secret")
    (tmp_path / "secret").write_text("planted-secret")
    (Path.home() / ".alignflow-planted").write_text("planted-secret")
    try:
        code = f"""
import os, glob
print(dict(os.environ), os.listdir(os.path.expanduser('~')))
for place in ['{tmp_path}/secret', '{Path.home()}/.alignflow-planted', '/etc/passwd', *glob.glob('/proc/*/environ')]:
    try: print(place, open(place).read())
    except OSError as error: print(type(error).__name__)
"""
        text = run(code).text
    finally:
        (Path.home() / ".alignflow-planted").unlink()
    assert "planted-secret" not in text and text.count("FileNotFoundError") == 3 and "[]" in text


@closed
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 2);"
            " print('connected')\nexcept OSError as e: print(e)"
        )
        assert "refused" in run(code).text


def test_without_bubblewrap_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "available", lambda: False)
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        run("print(1)")
    with pytest.raises(ValueError, match="no bubblewrap"):
        Tools()
    Tools(tools=["calculator"])
    monkeypatch.setenv(sandbox.MODE, "none")
    assert run("print(1)").text == "1\n"


def test_a_broken_bubblewrap_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.available.cache_clear()
    assert not sandbox.available()
    sandbox.available.cache_clear()


@closed
def test_no_more_programs_at_once_than_there_are_cpus() -> None:
    async def all_at_once() -> list[sandbox.Output]:
        return await asyncio.gather(*(sandbox.run(sandbox.python(), "print(1)") for _ in range(40)))

    assert [output.text for output in asyncio.run(all_at_once())] == ["1\n"] * 40


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 + 2) ** 3", "27"),
        ("7 / 2", "3.5"),
        ("7 // 2 - -1", "4"),
        ("sqrt(16) + abs(-2)", "6"),
        ("10 % 4", "2"),
    ],
)
def test_the_calculator_computes(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "10**101",
        "(-8)**0.5",
        "__import__('os')",
        "x",
        "1/0",
        "(1",
        "1e400",
        "'a'*3",
        "(" * 900,
        "f(1)",
    ],
)
def test_the_calculator_refuses(expression: str) -> None:
    start = time.monotonic()
    assert calculate(expression).startswith("error: ") and time.monotonic() - start < 30


@closed
def test_tools_answer_calls() -> None:
    tools = Tools()
    results = [
        (Call("calculator", {"expression": "1+1"}), "2"),
        (Call("python", {"code": "print(sum(range(10)))"}), "45\n"),
        (Call("oven", {}), "error: there is no tool 'oven'"),
        (Call("python", {}), "error: give 'code', a text"),
        (Call("python", {}, "its arguments are no JSON object"), "error: its arguments are no JSON object"),
    ]
    for call, told in results:
        assert asyncio.run(tools._result(call, 10)) == told
    loop = Call("python", {"code": "while True: pass"})
    assert "stopped after 1 s" in asyncio.run(Tools(seconds=1)._result(loop, 10))
    assert "used up their time" in asyncio.run(Tools()._result(loop, 0))
    for code in ("print(1)\x00", "print('\ud800')", "#" * 200_000):  # what a model may write
        assert isinstance(asyncio.run(Tools()._result(Call("python", {"code": code}), 10)), str)
    with pytest.raises(ValueError, match="no tool 'oven'"):
        Tools(tools=["oven"])


def test_answers_are_compared_by_text_or_last_number() -> None:
    assert (
        is_right("The sum is 1,042.", "1042")
        and is_right(" Paris ", "Paris")
        and is_right("2 and then 3.0", "3")
    )
    assert (
        not is_right("3 and then 2", "3")
        and not is_right("", "3")
        and not is_right("Paris", "3")
        and not is_right("1", "Paris")
    )
