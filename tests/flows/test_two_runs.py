"""Two runs on one stage, as processes of the command: one waits and says for whom; ended, it leaves the
other's stage alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.runs.run_records import records
from tests.support import micro
from tests.support.micro import WAIT_SECONDS, wait_until
from tests.support.programs import captured, hear_ctrl_c, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    micro.build(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def start(prefect: str, folder: Path) -> Iterator[Start]:
    """Returns a function that starts `alignflow run`, with its output in NAME.txt."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        environment = micro.environment(folder) | {"PREFECT_API_URL": prefect}
        command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", "seed=3", "--name", name]
        log = folder / f"{name}.txt"
        log.unlink(missing_ok=True)
        started.append(logged(command, log, cwd=folder, env=environment, preexec_fn=hear_ctrl_c))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))


def told(folder: Path, name: str) -> str:
    return " ".join((folder / f"{name}.txt").read_text().split())


def waits(folder: Path, name: str, holder: subprocess.Popen[bytes], line: str) -> None:
    """Waits until a run says who holds the stage."""
    (run,) = (run for run in records(folder / "artifacts") if run.name == "first")
    assert run.state == "running" and (run.pid, run.host) == (holder.pid, socket.gethostname())
    expected = (
        f"sft is waited for: run first ({run.id}) of micro, process {holder.pid}, on {socket.gethostname()}"
        " since 20"
    )
    wait_until(lambda: expected in told(folder, name), "the run to wait", told=lambda: told(folder, name))
    assert f" UTC works on it and says: {line}" in told(folder, name)


def statuses(folder: Path) -> dict[str, str]:
    return {
        stage["name"]: stage["status"]
        for stage in json.loads((folder / "artifacts" / "micro" / "run.json").read_text())["stages"]
    }


@pytest.mark.long
def test_a_waiting_run_ended_by_a_signal_and_one_that_takes_over(folder: Path, start: Start) -> None:
    (folder / "slow.json").write_text(json.dumps({"sft": "middle", "once": 250}))
    first = start("first")
    wait_until(
        lambda: micro.begun(folder) == ["sft"], "the stage to begin", told=lambda: told(folder, "first")
    )
    (stage,) = (folder / "artifacts" / "stages").glob("sft-*")
    wait_until(lambda: "middle" in (stage / "log.txt").read_text(), "the stage to hang")
    before = {file.name: file.read_bytes() for file in stage.iterdir() if file.is_file()}
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        other = start(f"{number.name}")
        waits(folder, number.name, first, "middle")
        os.kill(other.pid, number)
        assert other.wait(WAIT_SECONDS) == code, told(folder, number.name)
        assert statuses(folder)["sft"] == "running" and "failed" not in statuses(folder).values()
        summary = json.loads((folder / "artifacts" / "micro" / "summary.json").read_text())
        assert summary["stages"][0]["status"] == "running"
        assert {file.name: file.read_bytes() for file in stage.iterdir() if file.is_file()} == before
    second = start("second")
    waits(folder, "second", first, "middle")
    first.kill()
    assert second.wait(WAIT_SECONDS) == 0, told(folder, "second")
    assert micro.begun(folder).count("sft") == 2 and set(statuses(folder).values()) == {"done"}
    assert not (stage / ".holder").exists()
    runs = records(folder / "artifacts")
    states = {run.name: run.state for run in runs}
    assert states == {"first": "killed", "SIGTERM": "interrupted", "SIGINT": "interrupted", "second": "done"}
    assert {(run.source, run.overrides) for run in runs} == {("recipe.yaml", ("seed=3",))}

    def alignflow(*arguments: str) -> str:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return captured(command, cwd=folder, env=micro.environment(folder), check=True).stdout

    shown = alignflow("runs").splitlines()
    assert shown[0].split() == ["id", "name", "pinned", "state", "started", "recipe", "stages", "win", "rate"]
    assert shown[1].split()[1:3] == ["second", "done"]
    assert "4 of 4 done" in shown[1]
    assert "loop.round1 0.5" in shown[1]
    alignflow("runs", "pin", "first")
    assert shown[4].split()[1:3] == ["first", "killed"]
    assert alignflow("runs").splitlines()[4].split()[1:3] == ["first", "pinned"]
    kept = alignflow("gc", "--keep-runs", "0", "--delete")
    assert kept.count(f"(run first ({runs[-1].id}), pinned)") == 4 and "4 stages are kept; 0 folders" in kept


def test_a_stage_that_another_run_made_is_not_made_again(folder: Path, start: Start) -> None:
    (folder / "slow.json").write_text(json.dumps({"until": "go"}))
    first = start("first")
    wait_until(
        lambda: micro.begun(folder) == ["sft"], "the stage to begin", told=lambda: told(folder, "first")
    )
    second = start("second")
    waits(folder, "second", first, "--- ")
    (folder / "go").touch()
    assert first.wait(WAIT_SECONDS) == 0 and second.wait(WAIT_SECONDS) == 0, told(folder, "second")
    names = micro.begun(folder)
    assert len(names) == len(set(names)) == 4
