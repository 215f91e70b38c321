"""States of stages and runs by their files and locks, and that looking changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from filelock import FileLock

from evaluation.dashboard.artifacts_folder import FRESH, Folder, Missing
from evaluation.dashboard.locks import Locks
from evaluation.dashboard.state import Stage, questions, run_stages, stage_of, watched
from rlhf_core.runs.approval_record import ask, decide
from rlhf_core.runs.run_dir import HOLDER, LOCK, LOG, METRICS, REQUEST, RESULT, RunDir
from tests.unit.evaluation.dashboard.conftest import Artifacts

HERE = f"run second of demo, process 9, on {socket.gethostname()} since 2026-11-26 13:00:00 UTC"
THERE = HERE.replace(f" on {socket.gethostname()} ", " on another-host ")
BEGUN = "--- 2026-11-26 13:47:10 ppo\nstep 5/20  loss 1\n"


def look(artifacts: Artifacts, name: str = "ppo") -> Stage:
    folder = Folder(artifacts.path)
    folder.look()
    return stage_of(folder, artifacts.stage(name), name)


def unfinished(artifacts: Artifacts, log: str = "", holder: str = "") -> Path:
    run_dir = artifacts.stage("ppo")
    (run_dir / RESULT).unlink()
    (run_dir / LOG).write_text(log)
    if holder:
        (run_dir / HOLDER).write_text(holder)
    return run_dir


def test_a_finished_stage(artifacts: Artifacts) -> None:
    found = look(artifacts)
    assert (found.state, found.seconds, found.metric[:12], found.gates) == ("done", 131.7, "reward/mean ", ())
    request = json.loads((artifacts.stage("ppo") / REQUEST).read_text())
    request["config"]["gates"] = [
        {"metric": "kl/mean", "max": 0.1},
        {"metric": "absent", "min": 0, "on_fail": "warn"},
        {"metric": 3},
    ]
    (artifacts.stage("ppo") / REQUEST).write_text(json.dumps(request))
    assert look(artifacts).gates == (
        "does not pass a gate: kl/mean is 0.3399, at most 0.1 (stop)",
        "does not pass a gate: absent is missing, at least 0 (warn)",
    )


def test_a_stage_that_waits_for_a_person(artifacts: Artifacts) -> None:
    run_dir = artifacts.stage("ppo")
    request = json.loads((run_dir / REQUEST).read_text())
    for other, found in (
        # nobody is asked then
        ([{"metric": "kl/mean", "max": 0.1}], "does not pass a gate: kl/mean is 0.3399, at most 0.1 (stop)"),
        ([], "waits for a person"),
    ):
        request["config"]["gates"] = [{"approve": {"within": "48h"}}, *other]
        (run_dir / REQUEST).write_text(json.dumps(request))
        assert look(artifacts).gates == (found,)
    ask(run_dir, "ppo", artifacts.path / "demo", timedelta(hours=48))
    assert look(artifacts).gates[0].startswith("waits for a person until ")
    folder = Folder(artifacts.path)
    ((name, recipe, told),) = questions(folder)
    assert (name, recipe) == (run_dir.name, "demo") and told.startswith("waits for a person until ")
    before = watched(folder, run_dir)
    decide(run_dir, True, "ann")
    assert questions(folder) == []
    # an open page shows the decision
    assert look(artifacts).gates == () and watched(folder, run_dir) != before
    (run_dir / "approval.json").write_text('{"stage": 3}')
    assert look(artifacts).state == "done" and questions(Folder(artifacts.path)) == []


@pytest.mark.parametrize(
    ("log", "holder", "state", "told"),
    [
        ("", "", "not begun", "no process has started"),
        (BEGUN, "", "killed", "its process is gone; the next run continues"),
        (BEGUN, HERE, "killed", "its process is gone"),
        (
            BEGUN + "+++ 2026-11-26 13:48:10 ppo ended after 60.25 s with code 137\n",
            "",
            "killed",
            "ended by SIGKILL",
        ),
        (
            BEGUN + "+++ 2026-11-26 13:48:10 ppo ended after 60.25 s with code 1\n",
            "",
            "failed",
            "exit code 1; see the log for the reason",
        ),
        (BEGUN, THERE, "running", "another-host"),
    ],
)
def test_a_stage_without_a_result(artifacts: Artifacts, log: str, holder: str, state: str, told: str) -> None:
    unfinished(artifacts, log, holder)
    found = look(artifacts)
    assert found.state == state and told in found.told
    assert found.steps == ((5, 20) if log else None)


def test_a_stage_of_another_machine_without_news(artifacts: Artifacts) -> None:
    run_dir = unfinished(artifacts, BEGUN, THERE)
    past = time.time() - FRESH - 10
    for name in (REQUEST, METRICS, LOG):
        os.utime(run_dir / name, (past, past))
    found = look(artifacts)
    assert found.state == "killed" and "no update" in found.told and "another-host" in found.told


def test_a_run_of_another_machine(artifacts: Artifacts) -> None:
    artifacts.record("second", host="another-host", status="not run")
    run_dir = unfinished(artifacts, BEGUN, THERE.replace("process 9", "process 7"))
    folder = Folder(artifacts.path)
    run = folder.run("demo", "second")
    states = {stage.name: stage.state for stage in run_stages(folder, run)}
    assert (run.state, states["ppo"]) == ("running", "running")
    past = time.time() - FRESH - 10
    for file in [run_dir, *artifacts.path.glob("stages/*/*")]:
        os.utime(file, (past, past))
    run = folder.run("demo", "second")
    assert run.state == "killed"
    assert {stage.name: stage.state for stage in run_stages(folder, run)}["ppo"] == "killed"


@pytest.mark.parametrize("ours", [True, False])
def test_a_stage_runs_while_its_lock_is_held(artifacts: Artifacts, ours: bool) -> None:
    """By this process, and by another one that is then killed."""
    run_dir = unfinished(artifacts, BEGUN)
    code = f"""if True:
        import time; from filelock import FileLock
        with FileLock({str(run_dir / LOCK)!r}):
            print("held", flush=True); time.sleep(60)"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) if not ours else None
    with FileLock(run_dir / LOCK) if process is None else nullcontext():
        if process and process.stdout:
            assert process.stdout.readline() == b"held\n"
        found = look(artifacts)
        # steps of a second
        assert (found.state, found.steps) == ("running", (5, 20)) and found.left == pytest.approx(15.0)
        if process:
            process.kill()
            process.wait()
    assert look(artifacts).state == "killed"


def damaged(run_dir: Path) -> None:
    for name in (REQUEST, RESULT, METRICS, LOG):
        (run_dir / name).write_bytes(b'{"name": "ppo", \xff')


def of_another_version(run_dir: Path) -> None:
    (run_dir / REQUEST).write_text(
        json.dumps(
            {"name": "ppo", "digest": "x", "config": {"stage": "unheard-of", "gates": 3}, "inputs": {}}
        )
    )
    (run_dir / RESULT).write_text(json.dumps({"seconds": "long", "metrics": ["?"]}))


def of_another_result(run_dir: Path) -> None:
    of_another_version(run_dir)
    (run_dir / RESULT).write_text(json.dumps({"seconds": 3, "metrics": {"loss": "low"}}))


def removed(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


@pytest.mark.parametrize("change", [damaged, of_another_version, of_another_result, removed])
def test_damaged_or_missing_records_are_no_error(
    artifacts: Artifacts, change: Callable[[Path], None]
) -> None:
    change(artifacts.stage("ppo"))
    folder = Folder(artifacts.path)
    states = {stage.name: stage.state for stage in run_stages(folder, folder.run("demo", "first"))}
    assert states.pop("ppo") in ("not begun", "killed", "done")
    assert set(states.values()) == {"done"}
    assert len(states) == 8


def test_what_a_run_in_progress_waits_for(artifacts: Artifacts) -> None:
    other = artifacts.record("second", host=socket.gethostname(), status="not run")
    unfinished(artifacts, BEGUN, HERE)
    (artifacts.stage("evaluation") / RESULT).unlink()
    shutil.rmtree(artifacts.stage("publication"))
    (artifacts.stage("reward_model") / RESULT).unlink()
    (artifacts.stage("reward_model") / REQUEST).unlink()
    folder = Folder(artifacts.path)
    with FileLock(other.with_suffix(".lock")), FileLock(artifacts.stage("ppo") / LOCK):
        folder.look()
        run = folder.run("demo", "second")
        assert run.state == "running"
        found = {stage.name: stage for stage in run_stages(folder, run)}
    told = {
        name: (found[name].state, found[name].told)
        for name in ("ppo", "evaluation", "publication", "reward_model", "sft")
    }
    assert told == {
        "ppo": ("waiting", f"another run is working on it: {HERE}"),  # process 9, and this run's is 7
        "evaluation": ("waiting", "waits for ppo, reward_model"),
        "publication": ("waiting", "waits for evaluation"),
        "reward_model": ("waiting", "waits while ppo runs"),
        "sft": ("done", ""),
    }
    folder.look()
    assert folder.run("demo", "second").state == "killed", "nobody holds its lock, and it wrote no end"


def test_looking_writes_nothing_and_takes_no_lock(artifacts: Artifacts) -> None:
    run_dir = unfinished(artifacts, BEGUN, HERE)
    (run_dir / LOCK).touch()
    before = {path: path.lstat().st_mtime_ns for path in artifacts.path.rglob("*")}
    for path in artifacts.path.rglob("*"):
        path.chmod(path.stat().st_mode & 0o555)
    folder = Folder(artifacts.path)
    folder.look()
    assert run_stages(folder, folder.runs()[0]) and folder.curves(run_dir).step == 20
    assert before == {path: path.lstat().st_mtime_ns for path in artifacts.path.rglob("*")}
    with RunDir(run_dir).locked(0):
        assert look(artifacts).state == "running"


@pytest.mark.parametrize("name", ["..", ".", "", "sft/../..", "absent", "-x", "a\x00b", "x" * 5000])
def test_names_that_are_no_run_directory(artifacts: Artifacts, name: str) -> None:
    with pytest.raises(Missing):
        Folder(artifacts.path).stage(name)
    with pytest.raises(Missing):
        Folder(artifacts.path).run(name, "first")


def test_links_are_not_followed(artifacts: Artifacts, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"name": "secret"}')
    (artifacts.path / "stages" / "linked").symlink_to(artifacts.stage("sft"))
    (artifacts.stage("sft") / LOG).symlink_to(secret)
    (artifacts.path / "demo" / "runs" / "linked.json").symlink_to(secret)
    folder = Folder(artifacts.path)
    with pytest.raises(Missing):
        folder.stage("linked")
    assert folder.tail(artifacts.stage("sft") / LOG) == "" and folder.json(artifacts.stage("sft") / LOG) == {}
    assert sorted(run.state for run in folder.runs()) == ["damaged", "done"]


def test_locks_of_a_listing(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    about = file.stat()
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    lines = {
        f"1: FLOCK  ADVISORY  WRITE 27590 {device}:{about.st_ino} 0 EOF\n": True,
        f"1: -> FLOCK  ADVISORY  WRITE 27590 {device}:{about.st_ino} 0 EOF\n": False,  # waits for it
        f"1: FLOCK  ADVISORY  WRITE 27590 {device}:{about.st_ino + 1} 0 EOF\n": False,
        f"1: FLOCK  ADVISORY  WRITE 27590 7b:01:{about.st_ino} 0 EOF\n": False,
        "": False,
    }
    for text, held in lines.items():
        (tmp_path / "locks").write_text(text)
        assert Locks(tmp_path / "locks").held(file) is held, text
    assert not Locks(tmp_path / "absent").held(file)


def test_a_stage_that_failed_while_others_run_is_no_waiting_one(artifacts: Artifacts) -> None:
    """Stages that run side by side: one failed in this run, another was killed before it and is still to be
    run."""
    run_dir = unfinished(artifacts, BEGUN + "+++ 2026-11-26 13:48:10 ppo ended after 60.25 s with code 1\n")
    other = artifacts.record("second", host=socket.gethostname(), status="not run")
    folder = Folder(artifacts.path)

    def state_of(name: str) -> str:
        folder.look()
        return next(
            stage.state for stage in run_stages(folder, folder.run("demo", "second")) if stage.name == name
        )

    with FileLock(other.with_suffix(".lock")):
        started = folder.run("demo", "second").started
        for path in run_dir.iterdir():
            os.utime(path, (started - 60, started - 60))
        assert state_of("ppo") == "waiting"
        os.utime(run_dir / LOG, (started + 60, started + 60))
        assert state_of("ppo") == "failed"
