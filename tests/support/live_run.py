"""A run of one stage that a test drives step by step, with the real lock, log, metrics, resume states and
records; nothing is trained.

`run` is what a flow's process does; the stage's process is this module, started by `launch`. It makes as many
steps as the file `allowed` in the artifacts folder says, saves a state every second step, and goes on from
it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from rlhf_core.config import SFT, Data
from rlhf_core.runs.launch import launch
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import HOLDER_ENV, Outcome, RunDir, StageRequest, run_in_directory
from rlhf_core.system.files import locked, write_text
from tests.support.stage_request import stage_request

STEPS = 8
DIGEST = "0123456789abcdef"
RECIPE = "night"
ROOT = Path(__file__).parents[2]


def stage_dir(artifacts: Path) -> Path:
    return artifacts / "stages" / f"sft-{DIGEST}"


def allow(artifacts: Path, steps: int) -> None:
    write_text(artifacts / "allowed", str(steps))


def start(artifacts: Path, identity: str) -> subprocess.Popen[bytes]:
    """Starts a run in a process of its own."""
    code = (
        f"from pathlib import Path; from tests.support.live_run import run; run(Path({str(artifacts)!r}),"
        f" {identity!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


def run(artifacts: Path, identity: str) -> None:
    folder = artifacts / RECIPE / "runs"
    started = time.time()
    request = stage_request(SFT(data=Data.model_validate({"sources": "rows.jsonl"})), digest=DIGEST)

    def record(status: str, state: str = "", ended: float | None = None) -> None:
        stage = dict(
            name="sft", kind="sft", parents=[], run_dir=f"stages/sft-{DIGEST}", status=status, gates=[]
        )
        told = dict(
            name=None, state=state, recipe=RECIPE, host=socket.gethostname(), pid=os.getpid(), started=started
        )
        write_text(folder / f"{identity}.json", json.dumps(told | {"ended": ended, "stages": [stage]}))

    folder.mkdir(parents=True, exist_ok=True)
    os.environ[HOLDER_ENV] = f"run {identity} of {RECIPE}, process {os.getpid()},"
    with locked(folder / f"{identity}.lock"):
        record("not run")
        RunDir(stage_dir(artifacts)).prepare(request)
        launch("tests.support.live_run", stage_dir(artifacts), "sft", lambda line: None)
        record("done", "done", time.time())


def work(request: StageRequest, run: RunDir) -> Outcome:
    state = run / "state" / "step"
    allowed = run.path.parents[1] / "allowed"
    first = int(state.read_text()) if state.exists() else 0
    tracker = Tracker(run, STEPS, first)
    for step in range(first + 1, STEPS + 1):
        while int(allowed.read_text()) < step:
            time.sleep(0.05)
        tracker.log(step, {"loss": 2 / step, "grad_norm": 1.0}, show=("loss",))
        if step % 2 == 0:
            state.parent.mkdir(exist_ok=True)
            write_text(state, str(step))
    tracker.close()
    (run / "checkpoint").mkdir(exist_ok=True)
    (run / "checkpoint" / "model.safetensors").write_bytes(b"weights")
    return Outcome({"loss": 2 / STEPS}, {"checkpoint": "checkpoint"})


if __name__ == "__main__":
    run_in_directory(sys.argv[1], work)
