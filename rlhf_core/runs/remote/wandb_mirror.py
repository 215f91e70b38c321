"""Sends a stage's metrics to Weights & Biases through its client, which uploads them in its own process.

A W&B failure never ends a stage. An error becomes one line in the log, and waiting is limited to
START_SECONDS and FINISH_SECONDS. Data that a server did not accept stays in the stage's `.wandb`, for `wandb
sync`. A resumed stage continues its W&B run and sends no step twice.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from rlhf_core.runs.run_dir import REQUEST, RunDir
from rlhf_core.system.files import write_text
from rlhf_core.system.redaction import without_passwords

FOLDER = ".wandb"  # W&B's client uses this folder if it exists, else `wandb`; the store skips dotted names
KEY_ENV = "WANDB_API_KEY"
MODE_ENV = "WANDB_MODE"
PROBE_SECONDS = 3.0
START_SECONDS = 30.0
FINISH_SECONDS = 10.0


class Mirror:
    """The W&B run of a stage. After an error, it does nothing."""

    def __init__(self, run: RunDir):
        self._run = run
        self._board: Any = None
        with self._logged():
            self._board = _started(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of one step, unless W&B already has the step."""
        if self._board is not None and step >= self._board.step:
            with self._logged():
                self._board.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits at most FINISH_SECONDS until all data is sent."""
        if self._board is not None:
            with self._logged():
                self._board.finish()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._board = None
            text = " ".join(str(error).split())[:200].replace(os.environ.get(KEY_ENV) or "\0", "***")
            print(
                f"W&B gets no more metrics: {type(error).__name__}: {text}; `wandb sync` sends those in"
                f" {self._run / FOLDER}",
                flush=True,
            )


def mirror_of(run: RunDir) -> Mirror | None:
    """Returns a mirror of a stage's metrics if its `config.json` names a W&B project, otherwise None."""
    return Mirror(run) if (run / REQUEST).is_file() and run.request().wandb else None


def _started(run: RunDir) -> Any:
    """Returns the W&B run of the stage, which is offline when W&B's server does not answer."""
    import wandb

    request = run.request()
    assert request.wandb is not None
    offline = MODE_ENV not in os.environ and not _answers(
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    )
    if offline:
        print(
            "W&B's server does not answer: `wandb sync` sends the metrics later, from",
            run / FOLDER,
            flush=True,
        )
    return wandb.init(
        project=request.wandb.project,
        entity=request.wandb.entity,
        group=request.wandb.group,
        name=request.name,
        job_type=request.config.stage,
        id=_identity(run, request.digest),
        resume="allow",
        dir=str(run.path),
        config=json.loads(without_passwords(request.config.model_dump_json()))
        | {
            "seed": request.seed,
            "digest": request.digest,
        },
        mode="offline" if offline else None,
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )


def _answers(url: str) -> bool:
    try:
        httpx.head(url, timeout=PROBE_SECONDS)
        return True
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _identity(run: RunDir, digest: str) -> str:
    """Returns the id of the W&B run, which is the same for each attempt in this directory but differs for the
    same digest in other directories."""
    file = run / FOLDER / "id"
    if not file.is_file():
        file.parent.mkdir(exist_ok=True)
        write_text(file, f"{digest}-{secrets.token_hex(4)}")
    return file.read_text()
