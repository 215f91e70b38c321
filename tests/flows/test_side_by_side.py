"""Two stages at once: cancelled, terminated and killed in every way, all of their processes end, and the next
run repeats only these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_core.runs.run_records import records
from tests.crash.points import files
from tests.support import micro
from tests.support.micro import WAIT_SECONDS, Serve, ask, wait_until
from tests.support.programs import alive, hear_ctrl_c, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STAGES = ("sft", "one", "two", "evaluation")
# Until all processes must have ended, also on a busy machine. Those that hang would go on for 250 s.
LIMIT_SECONDS = 150


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "here"
    micro.build(folder, micro.BRANCHES)
    yield folder
    for process in micro.left(folder):
        process.kill()


def start(folder: Path, api: str | None, *arguments: str) -> subprocess.Popen[bytes]:
    environment = micro.environment(folder) | ({"PREFECT_API_URL": api} if api else {})
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml", *arguments]
    return logged(command, folder / "out.txt", cwd=folder, env=environment, preexec_fn=hear_ctrl_c)


def told(folder: Path) -> str:
    return (folder / "out.txt").read_text()[-4000:]


def hang(folder: Path, **more: object) -> None:
    """Has both branches hang in the middle, with a child that ignores SIGTERM."""
    (folder / "slow.json").write_text(
        json.dumps({"one": "middle", "two": "middle", "stubborn": True, **more})
    )


def both_hang(folder: Path) -> dict[str, psutil.Process]:
    """Waits until both branches hang; their processes."""

    def hanging() -> list[str]:
        return [
            name
            for name in ("one", "two")
            for log in folder.glob(f"artifacts/stages/{name}-*/log.txt")
            if "middle" in log.read_text()
        ]

    wait_until(
        lambda: len(hanging()) == 2,
        "both branches to hang",
        told=lambda: told(folder) if (folder / "out.txt").exists() else "",
    )
    return {name: psutil.Process(pid) for name, _, pid in micro.attempts(folder) if name in ("one", "two")}


def run_again(folder: Path, api: str | None) -> None:
    """Runs the rest: no stage that was done is repeated."""
    assert not [name for name in ("one", "two") if files(folder, name)]
    (folder / "slow.json").unlink()
    assert start(folder, api).wait(WAIT_SECONDS) == 0, told(folder)
    assert Counter(micro.begun(folder)) == {"sft": 1, "one": 2, "two": 2, "evaluation": 1}


@pytest.mark.parametrize(
    ("number", "own_server", "code", "state"),
    [
        pytest.param(signal.SIGINT, False, 130, "interrupted"),
        pytest.param(signal.SIGINT, True, 130, "interrupted", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, False, 143, "interrupted", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, False, -9, "killed"),
        pytest.param(signal.SIGKILL, True, -9, "killed", marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_both(
    prefect: str, folder: Path, number: signal.Signals, own_server: bool, code: int, state: str
) -> None:
    api = None if own_server else prefect
    hang(folder)
    run = start(folder, api)
    both_hang(folder)
    os.kill(run.pid, number)
    if number == signal.SIGINT:
        os.kill(run.pid, number)  # a second one does not leave the processes behind
    assert run.wait(LIMIT_SECONDS) == code, told(folder)
    wait_until(
        lambda: not micro.left(folder), "all processes to end", LIMIT_SECONDS, lambda: str(micro.left(folder))
    )
    assert [run.state for run in records(folder / "artifacts")] == [state]
    if number != signal.SIGKILL:
        summary = json.loads((folder / "artifacts" / "micro" / "summary.json").read_text())
        assert [stage["status"] for stage in summary["stages"]] == [
            "done",
            "interrupted",
            "interrupted",
            "not run",
        ]
    run_again(folder, api)


def test_a_killed_stage_is_retried_beside_the_other(prefect: str, folder: Path) -> None:
    hang(folder, once=20)
    run = start(folder, prefect)
    both_hang(folder)["one"].kill()
    assert run.wait(WAIT_SECONDS) == 0, told(folder)
    assert Counter(micro.begun(folder)) == {"sft": 1, "one": 2, "two": 1, "evaluation": 1}
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))


def test_side_by_side_and_one_after_the_other_have_the_same_result(
    prefect: str, folder: Path, tmp_path: Path
) -> None:
    """The branches wait for each other, so that only a run of both at once ends."""
    (folder / "slow.json").write_text(json.dumps({"until": "go"}))
    run = start(folder, prefect)
    wait_until(lambda: micro.begun(folder) == ["sft"], "the first stage", told=lambda: told(folder))
    (folder / "go").touch()
    (folder / "slow.json").write_text(json.dumps({"until": "both"}))
    wait_until(
        lambda: sorted(micro.begun(folder)) == ["one", "sft", "two"],
        "both branches",
        told=lambda: told(folder),
    )
    (folder / "both").touch()
    assert run.wait(WAIT_SECONDS) == 0, told(folder)

    other = tmp_path / "other"
    micro.build(other, micro.BRANCHES)
    assert start(other, prefect, "--jobs", "1").wait(WAIT_SECONDS) == 0, told(other)
    assert micro.begun(other) == list(STAGES)
    for stage in STAGES:
        assert files(folder, stage) and files(folder, stage) == files(other, stage), stage


@pytest.mark.long
def test_cancelled_and_killed_under_serve(tmp_path: Path) -> None:
    """Both branches share the machine's slot, which another run waits for; cancelled by the API, and their
    flow killed."""
    folder = tmp_path / "here"
    serve = Serve(folder, micro.build(folder, micro.BRANCHES), "--no-schedule")
    try:
        api = serve.ready()
        for seed, how in enumerate(("cancel", "kill"), start=1):
            hang(folder)
            (folder / "attempts.txt").unlink(missing_ok=True)
            run = serve.run(api, "alignment/micro", overrides=[f"seed={seed}"])
            wait_until(lambda: len(micro.begun(folder)) == 3, "both branches", told=serve.told)
            stages = [psutil.Process(pid) for name, _, pid in micro.attempts(folder) if name != "sft"]
            wait_until(lambda: all(stage.children() for stage in stages), "both branches to hang")  # noqa: B023
            processes = [
                process for stage in stages for process in (stage.parent(), stage, *stage.children())
            ]
            other = serve.run(api, "alignment/micro", overrides=[f"seed={seed + 10}"])
            serve.reaches(api, other, "RUNNING")
            assert len(micro.begun(folder)) == 3, "it waits for the slot"
            if how == "cancel":
                ask(api, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
            else:
                flow = stages[0].parents()[1]
                assert "prefect.engine" in flow.cmdline()
                flow.kill()
            wait_until(
                lambda: not [p for p in processes if p and alive(p)],  # noqa: B023
                "all to end",
                LIMIT_SECONDS,
                serve.told,
            )
            ended = {"cancel": "CANCELLED", "kill": "CRASHED"}[how]
            serve.reaches(api, run, ended)
            (folder / "slow.json").unlink()
            serve.reaches(api, other, "COMPLETED")
            again = serve.run(api, "alignment/micro", overrides=[f"seed={seed}"])
            serve.reaches(api, again, "COMPLETED")
            assert Counter(micro.begun(folder)) == {"sft": 2, "one": 3, "two": 3, "evaluation": 2}
        assert "Traceback" not in (folder / "serve.txt").read_text()
    finally:
        serve.stop()
    wait_until(lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder)))
