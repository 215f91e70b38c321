"""Six points of the crash matrix (one of them long), and the matrix's own code: kill -9 of each kind of
victim, at the start, in the middle and at the end of stages that only write what a stage writes
(tests/crash/run_all.py has all points, with real stages)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.points import Chain, Moment, Outcome, files, moments_of, point
from tests.support import micro

pytestmark = pytest.mark.timeout(900)
STAGES = ("sft", "loop.round1.preferences", "loop.round1.dpo", "evaluation")
# of the log: its head, and one before each place where a stage may hang
LINES = {"start": 2, "middle": 3, "end": 4}
HANGS_SECONDS = 30


@pytest.fixture(scope="module")
def undisturbed(prefect: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "here"
    environment = micro.build(folder)
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.yaml"]
    subprocess.run(
        command, cwd=folder, env=environment | {"PREFECT_API_URL": prefect}, check=True, timeout=300
    )
    assert all(files(folder, stage) for stage in STAGES)
    return folder


@pytest.mark.parametrize(
    ("name", "finished", "starts"),
    [
        ("sft/flow/middle", False, (1, 2)),
        # its server is restarted, and the flow completes
        pytest.param("sft/server/middle", True, (1, 1), marks=pytest.mark.long),
        # the flow retries the stage
        pytest.param("loop.round1.preferences/stage/start", True, (2, 2), marks=pytest.mark.long),
        pytest.param("loop.round1.dpo/worker/end", False, (1, 2), marks=pytest.mark.long),
        pytest.param("loop.round1.dpo/stage/end", True, (2, 2), marks=pytest.mark.long),
        pytest.param("evaluation/flow/start", False, (1, 2), marks=pytest.mark.long),
    ],
)
def test_killed_and_run_again(
    prefect: str, undisturbed: Path, tmp_path: Path, name: str, finished: bool, starts: tuple[int, int]
) -> None:
    stage, who, when = name.split("/")
    folder = tmp_path / "here"

    def prepare(folder: Path) -> dict[str, str]:
        environment = micro.build(folder)
        (folder / "slow.json").write_text(json.dumps({stage: when, "once": HANGS_SECONDS}))
        return environment

    outcome = point(
        name, Chain("micro", STAGES, prepare), undisturbed, folder, Moment(LINES[when], 0.5), prefect
    )
    told = f"{outcome}\n{(folder / 'out.txt').read_text()[-3000:]}"
    assert outcome.ok and outcome.killed, told
    assert (outcome.finished, outcome.starts) == (finished, starts), told
    assert (outcome.code == 0) == finished and (who != "worker" or outcome.code == 3), told


def test_a_repeated_or_different_stage_is_detected() -> None:
    good = Outcome(
        killed=True, gone=True, code=1, again=0, same=True, finished=False, starts=(1, 2), once=True
    )
    assert good.ok
    assert not any(
        bad.ok
        for bad in (
            good._replace(gone=False),
            good._replace(again=1),
            good._replace(same=False),
            good._replace(once=False),
        )
    )


def test_kill_times_are_between_the_first_step_and_the_result() -> None:
    steps = [(10.0, 1, 0), (20.0, 2, 0), (60.0, 3, 1), (70.0, 4, 2), (79.0, 5, 3)]
    assert moments_of(steps, 80.0) == dict(start=Moment(1, 7.0), middle=Moment(6, 0.0), end=Moment(6, 8.0))
    none = [(10.0, 1, 0), (20.0, 2, 0), (60.0, 3, 0)]
    assert moments_of(none, 80.0) == dict(start=Moment(1, 7.0), middle=Moment(2, 25.0), end=Moment(3, 13.0))
