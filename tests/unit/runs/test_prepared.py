"""Processes that are started ahead of their stage, with small real ones: which stage gets them, and that none
is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_core.config import SFT
from rlhf_core.runs import prepared as ahead
from rlhf_core.runs.launch import launch
from rlhf_core.runs.prepared import Prepared
from rlhf_core.runs.run_dir import HOLDER_ENV, RunDir
from rlhf_core.system.processes import child_environment
from tests.support.stage_request import stage_request

MODULE = "stage_that_waits"
# A stage whose process leaves its pid in a file as soon as it runs, and prints the variable that a test
# changes.
STAGE = """
import os, sys
from pathlib import Path
Path(os.environ["PIDS"], str(os.getpid())).touch()
from rlhf_core.runs.prepared import WAIT, awaited
from rlhf_core.runs.run_dir import Outcome, run_in_directory

run_dir = awaited(int(sys.argv[3])) if sys.argv[1] == WAIT else sys.argv[1]
if run_dir:
    print("process", os.getpid(), os.environ.get("CHANGED", "as it was"), flush=True)
    if "ALIGNFLOW_HOLDER" in os.environ:
        print("held by", os.environ["ALIGNFLOW_HOLDER"], flush=True)
    run_in_directory(run_dir, lambda request, run: Outcome({}, {}))
"""
PARENT = f"""
import sys, time
from rlhf_core.runs import prepared as ahead
ahead.num_gpus, ahead.free_memory = lambda: 0, lambda: 1 << 40
ahead.prepared.plan({MODULE!r}, "sft")
ahead.prepared.start()
time.sleep(120)
"""


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepared]:
    (tmp_path / f"{MODULE}.py").write_text(STAGE)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(ahead, "num_gpus", lambda: 0)
    monkeypatch.setattr(ahead, "free_memory", lambda: 1 << 40)
    yield ahead.prepared
    ahead.prepared.end()


def run(folder: Path, name: str = "stage") -> list[str]:
    """Runs a stage; returns what it printed."""
    made = RunDir(folder / name)
    made.prepare(stage_request(SFT.model_validate({"data": {"sources": "x.jsonl"}}), name="x", digest="d"))
    lines: list[str] = []
    launch(MODULE, made.path, "x", lines.append)
    return lines


def ready(waiting: Prepared) -> None:
    waiting.plan(MODULE, "sft")
    waiting.start()


def begun(folder: Path, count: int = 1) -> list[int]:
    """Waits until so many processes have begun; returns their pids."""
    until(lambda: len(list((folder / "pids").iterdir())) >= count)
    return [int(path.name) for path in (folder / "pids").iterdir()]


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline, "waited 100 s"
        time.sleep(0.02)


def test_a_stage_runs_in_the_process_that_was_started_ahead(waiting: Prepared, tmp_path: Path) -> None:
    ready(waiting)
    (pid,) = begun(tmp_path)
    assert run(tmp_path) == [f"process {pid} as it was"]
    assert begun(tmp_path) == [pid] and not psutil.pid_exists(pid)


def test_the_next_stage_is_prepared_while_a_stage_runs_which_does_not_take_it(
    waiting: Prepared, tmp_path: Path
) -> None:
    waiting.plan(MODULE, "sft")
    (first,) = run(tmp_path)
    pids = begun(tmp_path, 2)
    (second,) = run(tmp_path, "next")
    assert first != second and {first, second} == {f"process {pid} as it was" for pid in pids}
    assert run(tmp_path, "last") not in ([first], [second])  # nothing was planned after the second


def test_a_stage_with_another_environment_gets_a_process_of_its_own(
    waiting: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(waiting)
    (ahead_of_it,) = begun(tmp_path)
    monkeypatch.setenv("CHANGED", "later")
    (line,) = run(tmp_path)
    (own,) = {*begun(tmp_path, 2)} - {ahead_of_it}
    assert line == f"process {own} later" and not psutil.pid_exists(ahead_of_it)


def test_a_waiting_process_receives_the_variables_that_the_run_sets_later(
    waiting: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOLDER_ENV, raising=False)
    ready(waiting)
    (pid,) = begun(tmp_path)
    monkeypatch.setenv(HOLDER_ENV, "run 7")
    assert run(tmp_path) == [f"process {pid} as it was", "held by run 7"]


def test_a_waiting_process_loses_a_variable_that_its_run_no_longer_has(
    waiting: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOLDER_ENV, "run 7")
    ready(waiting)
    (pid,) = begun(tmp_path)
    monkeypatch.delenv(HOLDER_ENV)
    assert run(tmp_path) == [f"process {pid} as it was"]


@pytest.mark.parametrize(("changed", "kept"), [(None, True), ("later", False)])
def test_a_second_start_replaces_only_a_process_that_would_not_be_used(
    waiting: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: str | None,
    kept: bool,
) -> None:
    ready(waiting)
    (first,) = begun(tmp_path)
    if changed:
        monkeypatch.setenv("CHANGED", changed)
    ready(waiting)
    begun(tmp_path, 1 if kept else 2)
    (line,) = run(tmp_path)
    assert (line == f"process {first} as it was") is kept
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize("wrong", ["kind", "module", "folder"])
def test_a_process_that_waits_for_another_stage_is_not_used(
    waiting: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    ready(waiting)
    (pid,) = begun(tmp_path)
    if wrong == "folder":
        monkeypatch.chdir(tmp_path)
    taken = waiting.take(
        "other" if wrong == "module" else MODULE,
        "dpo" if wrong == "kind" else "sft",
        tmp_path,
        ahead.GRACE_SECONDS,
    )
    assert taken is None and not psutil.pid_exists(pid)


def test_a_stage_runs_although_the_process_that_waited_was_killed(waiting: Prepared, tmp_path: Path) -> None:
    ready(waiting)
    (pid,) = begun(tmp_path)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    assert waiting._waiting is not None
    waiting._waiting.reaper.wait(100)  # it looks ten times a second
    (line,) = run(tmp_path)
    assert line != f"process {pid} as it was" and line.startswith("process ")


def test_a_process_that_waits_is_ended(waiting: Prepared, tmp_path: Path) -> None:
    ready(waiting)
    (pid,) = begun(tmp_path)
    waiting.end()
    assert not psutil.pid_exists(pid) and waiting.take(MODULE, "sft", tmp_path, ahead.GRACE_SECONDS) is None


def test_a_process_that_waits_ends_with_its_parent_killed(waiting: Prepared, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], env=child_environment())
    try:
        (pid,) = begun(tmp_path)
        reaper = psutil.Process(pid).parent()
    finally:
        parent.kill()
        parent.wait()
    assert reaper is not None
    until(lambda: not psutil.pid_exists(pid) and not reaper.is_running())


@pytest.mark.parametrize(("name", "found"), [("num_gpus", 1), ("free_memory", 1 << 30)])
def test_no_process_waits_beside_a_gpu_or_without_memory(
    waiting: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: int
) -> None:
    monkeypatch.setattr(ahead, name, lambda: found)
    ready(waiting)
    assert waiting.take(MODULE, "sft", tmp_path, ahead.GRACE_SECONDS) is None
    assert not list((tmp_path / "pids").iterdir())
