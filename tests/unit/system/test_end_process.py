"""How a stage's process ends: with everything that was promised done, and its modules left as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from rlhf_core.system.processes import end_process

class Left:
    def __del__(self):
        print("taken apart", flush=True)

left = Left()
print("buffered")
first = threading.Event()
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (first.wait(), print("worked")))
threading.Thread(target=lambda: (time.sleep(0.3), print("waited for"), first.set())).start()
atexit.register(print, "registered")
print("said", file=sys.stderr)
end_process(7)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def test_threads_handlers_and_buffers_are_not_lost() -> None:
    done = run("-c", PROGRAM)
    assert done.returncode == 7 and done.stderr == "said\n"
    assert done.stdout.split("\n") == ["buffered", "waited for", "worked", "registered", ""]


@pytest.mark.parametrize("package", ["rlhf_core", "evaluation"])
def test_a_stage_without_a_run_directory_says_so(package: str, tmp_path: object) -> None:
    done = run("-P", "-m", package, f"{tmp_path}/missing")
    assert done.returncode == 2 and "missing is no run directory" in done.stderr


def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    program = "from rlhf_core.system.processes import end_process\nprint('x' * 100)\nend_process(5)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=buffered)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 5
