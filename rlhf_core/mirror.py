"""A stage's metrics in Weights & Biases: a process beside the stage reads `metrics.jsonl` as it grows, and sends the lines.

The stage never waits for it, but for CLOSE_SECONDS at its end: a slow import, a slow server or a fault of the client stay over there. A
server that does not answer at the start is not asked again: the lines stay in the stage's `.wandb`, for `wandb sync`. A stage that goes
on where it was cut off goes on with its run, and sends no step twice.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from rlhf_core.passwords import without_passwords
from rlhf_core.stage import METRICS, REQUEST, RunDir, write_text

FOLDER = ".wandb"  # W&B's client takes it where it is there, else `wandb`; copies of stages in a store are without dotted names
KEY_ENV, MODE_ENV = "WANDB_API_KEY", "WANDB_MODE"
POLL_SECONDS, PROBE_SECONDS, CLOSE_SECONDS = 1.0, 3.0, 10.0
DONE = b"done"


class Mirror:
    """The process beside a stage."""

    def __init__(self, run: RunDir):
        self._folder = run / FOLDER
        command = [sys.executable, "-P", "-m", "rlhf_core.mirror", str(run.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Says that the stage is done, and waits for the last lines to be sent, CLOSE_SECONDS at most."""
        try:
            self._process.communicate(DONE, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the client's own process
            self._process.wait()
            print(f"W&B has not taken all metrics after {CLOSE_SECONDS:.0f} s: `wandb sync` sends what lies in {self._folder}", flush=True)


def mirror_of(run: RunDir) -> Mirror | None:
    """Begins to mirror a stage's metrics, when its request asks for that."""
    return Mirror(run) if (run / REQUEST).is_file() and run.request().wandb else None


def send(run: RunDir) -> None:
    """Sends the lines until standard input ends. Whatever goes wrong is one line in the stage's log."""
    request = run.request()
    assert request.wandb is not None
    try:
        import wandb

        place = request.wandb
        offline = MODE_ENV not in os.environ and not _answers(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        if offline:
            print("W&B's server does not answer: `wandb sync` sends the metrics later, from", run / FOLDER, flush=True)
        board = wandb.init(
            project=place.project,
            entity=place.entity,
            group=place.group,
            name=request.name,
            job_type=request.config.stage,
            id=_identity(run, request.digest),
            resume="allow",
            dir=str(run.path),
            config=json.loads(without_passwords(request.config.model_dump_json())) | {"seed": request.seed, "digest": request.digest},
            mode="offline" if offline else None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        done = False
        for line in _grown(run / METRICS):
            if line is None:
                done = True
            elif line["step"] >= board.step:  # of a run that goes on, W&B has the others
                metrics = {name: value for name, value in line.items() if name not in ("step", "time")}
                board.log(metrics, step=line["step"])
        board.finish(exit_code=0 if done else 1)
    except Exception as error:  # a client of somebody else's service must not cost a stage
        text = " ".join(str(error).split())[:200].replace(os.environ.get(KEY_ENV) or "\0", "***")
        print(f"W&B gets no metrics of {request.name}: {type(error).__name__}: {text}", flush=True)


def _grown(file: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a file, as they are written until standard input ends; a last None when that said that the stage is done."""
    with file.open() as lines:
        rest, ended = "", False
        while not ended:
            ended = bool(select.select([0], [], [], POLL_SECONDS)[0])
            *whole, rest = (rest + lines.read()).split("\n")
            yield from (json.loads(line) for line in whole)
    if os.read(0, len(DONE)) == DONE:
        yield None


def _answers(url: str) -> bool:
    try:
        httpx.head(url, timeout=PROBE_SECONDS)
        return True
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _identity(run: RunDir, digest: str) -> str:
    """Of the run in W&B: the same for each attempt of this directory, and another one elsewhere, where the same work may be done too."""
    file = run / FOLDER / "id"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        write_text(file, f"{digest}-{secrets.token_hex(4)}")
    return file.read_text()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, whose end this one hears of
    send(RunDir(sys.argv[1]))
