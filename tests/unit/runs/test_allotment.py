"""What a stage in a thread gets, and how each wait of it ends with its run: of its process, for another run,
for the store."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from rlhf_core.config import SFT
from rlhf_core.runs.allotment import Allotment, Stopped, allotment, check_stop, variables
from rlhf_core.runs.launch import launch
from rlhf_core.runs.remote.remote_files import RemoteFiles
from rlhf_core.runs.run_dir import LOCK, RunDir
from tests.support.micro import wait_until
from tests.support.stage_request import stage_request

STAGE = """
import os, subprocess, sys, time
from pathlib import Path
from rlhf_core.runs.run_dir import Outcome, run_in_directory

def work(request, run):
    child = subprocess.Popen(["sleep", "200"], start_new_session=True)
    print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), "pids", os.getpid(), child.pid, flush=True)
    time.sleep(200)

run_in_directory(sys.argv[1], work)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hanging_stage.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    run = RunDir(tmp_path / "sft")
    config = SFT.model_validate({"data": {"sources": "x.jsonl"}})
    run.prepare(stage_request(config, digest="d"))
    return run


class InThread:
    """Makes a call in a thread with an allotment; `error` is what ended it."""

    def __init__(self, given: Allotment, call: Callable[[], Any]):
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        context.run(allotment.set, given)
        self.thread = threading.Thread(target=context.run, args=(self._work, call))
        self.thread.start()

    def _work(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error


def test_a_process_gets_its_variables_and_ends_at_the_sign(run: RunDir) -> None:
    lines: list[str] = []
    given = Allotment({"CUDA_VISIBLE_DEVICES": "1,3"})
    working = InThread(given, lambda: launch("hanging_stage", run.path, "sft", lines.append, 1.0))
    wait_until(lambda: lines, "the stage to begin")
    _, gpus, _, *pids = lines[0].split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    assert gpus == "1,3" and all(process.is_running() for process in processes)
    given.stop.set()
    working.thread.join(60)
    assert isinstance(working.error, Stopped) and not any(map(psutil.pid_exists, map(int, pids)))
    assert run.result() is None and "+++" not in (run / "log.txt").read_text()


def test_a_wait_for_another_run_ends_at_the_sign(run: RunDir) -> None:
    given = Allotment()
    said = list[str]()
    with FileLock(run / LOCK):
        waiting = InThread(given, lambda: run.wait("sft", said.append))
        wait_until(lambda: said, "it to wait")
        given.stop.set()
        waiting.thread.join(60)
        assert isinstance(waiting.error, Stopped)


def test_a_copy_of_many_files_ends_after_the_one_in_progress(tmp_path: Path) -> None:
    given = Allotment()
    files = RemoteFiles(str(tmp_path / "store"))

    def copy() -> None:
        for i in range(3):
            files.write(b"content", f"file{i}")
            given.stop.set()

    copying = InThread(given, copy)
    copying.thread.join(60)
    assert isinstance(copying.error, Stopped) and files.names("") == ["file0"]


def test_the_main_thread_has_neither() -> None:
    check_stop()
    assert variables() == {} and allotment.get() is None
