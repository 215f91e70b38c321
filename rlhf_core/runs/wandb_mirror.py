"""Sends a stage's metrics to Weights & Biases from a second process, which reads `metrics.jsonl` as it grows.

The stage waits for that process only at its end, for at most CLOSE_SECONDS, so a slow import, a slow server or an error of the client does
not delay it. When the server does not answer at the start, the lines stay in the stage's `.wandb`, for `wandb sync`. A resumed stage
continues its W&B run, and sends no step twice.
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

from rlhf_core.runs.run_dir import METRICS, REQUEST, RunDir
from rlhf_core.system.files import write_text
from rlhf_core.system.redaction import without_passwords

FOLDER = ".wandb"  # W&B's client uses it if it exists, else `wandb`; the store does not copy dotted names
KEY_ENV, MODE_ENV = "WANDB_API_KEY", "WANDB_MODE"
POLL_SECONDS, PROBE_SECONDS, CLOSE_SECONDS = 1.0, 3.0, 10.0
DONE = b"done"


class Mirror:
    """The process that sends a stage's metrics."""

    def __init__(self, run: RunDir):
        self._folder = run / FOLDER
        command = [sys.executable, "-P", "-m", "rlhf_core.runs.wandb_mirror", str(run.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Signals that the stage is done, and waits at most CLOSE_SECONDS for the last lines to be sent."""
        try:
            self._process.communicate(DONE, CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # includes the client's own process
            self._process.wait()
            print(f"W&B has not taken all metrics after {CLOSE_SECONDS:.0f} s: `wandb sync` sends those in {self._folder}", flush=True)


def mirror_of(run: RunDir) -> Mirror | None:
    """Starts to mirror a stage's metrics when its `config.json` names a W&B project; else returns None."""
    return Mirror(run) if (run / REQUEST).is_file() and run.request().wandb else None


def send(run: RunDir) -> None:
    """Sends the lines until standard input ends. Any error becomes one line in the stage's log."""
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
            elif line["step"] >= board.step:  # W&B has the earlier steps of a resumed run
                metrics = {name: value for name, value in line.items() if name not in ("step", "time")}
                board.log(metrics, step=line["step"])
        board.finish(exit_code=0 if done else 1)
    except Exception as error:  # an error of W&B must not fail the stage
        text = " ".join(str(error).split())[:200].replace(os.environ.get(KEY_ENV) or "\0", "***")
        print(f"W&B gets no metrics of {request.name}: {type(error).__name__}: {text}", flush=True)


def _grown(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the lines of a file as they are written, until standard input ends; then None when it ended with DONE."""
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
    """Returns the id of the W&B run: the same for each attempt in this directory, another for the same digest in other directories."""
    file = run / FOLDER / "id"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        write_text(file, f"{digest}-{secrets.token_hex(4)}")
    return file.read_text()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the stage, which closes this process's standard input
    send(RunDir(sys.argv[1]))
