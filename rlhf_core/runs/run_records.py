"""Reads, finds and pins the records of runs, `<artifacts>/<recipe>/runs/<id>.json`, which tasks/run_report.py
writes. Torch-free.

A run in progress holds `<id>.lock`, which the system releases when its process dies. `<id>.pin` next to a
record pins the run. These are separate files, so that only the run itself writes its record. `<id>.html` is
the run's page. A recipe's `run.json` counts as a record if `runs/` lacks that run.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field

from rlhf_core.system.files import is_locked

RUN = "run.json"
RUNS = "runs"
LOCK = ".lock"
PIN = ".pin"
PAGE = ".html"
MAX_NEAREST = 3
MAX_LISTED = 5  # runs listed in a message
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunRequest(NamedTuple):
    """The request for a run. `source`: path or URI of the recipe; `name` and `id`: name and id of the run,
    which gets a new id if none is given."""

    source: str = ""
    overrides: tuple[str, ...] = ()
    name: str | None = None
    id: str = ""


def new_id(started: float) -> str:
    """Returns an id for a run that starts at the time `started`, in seconds since 1970."""
    return f"{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


# set by the command line before it calls a flow
asked: ContextVar[RunRequest | None] = ContextVar("asked", default=None)


class RecordedStage(BaseModel):
    """A stage of a recorded run. `run_dir` is relative to the artifacts folder; `status`: the outcome of the
    stage in the run; `parents`: the stages on which it depends."""

    name: str
    run_dir: str = Field(pattern=r"^stages/[^/\x00]+$")
    status: str = ""
    kind: str = ""
    parents: tuple[str, ...] = ()


class RunRecord(BaseModel):
    """A recorded run. Records in earlier layouts lack some fields. `state`: done, waits (for a person),
    failed, gate failed, interrupted, running, killed (its process ended without recording it), damaged
    (unreadable record), or unfinished (in earlier layouts). Times are in seconds since 1970. `why`: the
    reason if the run failed before it had any stage."""

    file: Path = Path()
    id: str = ""
    name: str | None = None
    pinned: bool = False
    state: str = ""
    why: str = ""
    recipe: str = ""
    source: str = ""
    overrides: tuple[str, ...] = ()
    host: str = ""
    pid: int | None = None
    started: float = Field(0, ge=0, le=2.5e11)
    ended: float | None = Field(None, ge=0, le=2.5e11)
    stages: tuple[RecordedStage, ...] = ()

    @property
    def label(self) -> str:
        """Returns the run's name and id, for messages."""
        return f"{self.name} ({self.id})" if self.name else self.id

    @property
    def heading(self) -> str:
        """Returns the heading of the run's page: name, id and overrides, which distinguish the run from
        others of the recipe."""
        label = self.label
        if not self.overrides:
            return label
        return f"{label}, with {' '.join(self.overrides)}".removeprefix(", ")

    def require_whole(self) -> RunRecord:
        """Returns this record. Raises ValueError when it is damaged."""
        if self.state == "damaged":
            again = (
                f"run the recipe again, or remove {self.file.parent}"
                if self.file.name == RUN
                else "restore it, or remove it"
            )
            raise ValueError(f"{self.file} cannot be read: {again} if nothing needs it")
        return self


def check_name(name: str | None) -> None:
    """Raises ValueError if a string cannot name a run."""
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(
            f"--name {name[:80]!r}: give 1 to 64 letters, digits, dots, dashes or underscores, first a letter"
            " or digit"
        )


def records(artifacts: Path, read_one: Callable[[Path], RunRecord] | None = None) -> list[RunRecord]:
    """Returns the recorded runs, newest first. `read_one`: reads a record; default: `read`."""
    read_one = read_one or read
    found = [read_one(file) for file in artifacts.glob(f"*/{RUNS}/*.json")]
    known = {(run.recipe, run.started) for run in found}
    last = [read_one(file) for file in artifacts.glob(f"*/{RUN}")]
    found += [run for run in last if (run.recipe, run.started) not in known]
    return sorted(found, key=lambda run: (run.started, run.id), reverse=True)


def find_run(artifacts: Path, which: str) -> RunRecord:
    """Returns a run by its id, by its name (the newest run of that name), or by a unique prefix of its id.
    Raises ValueError, naming similar runs, if there is none, and also for an ambiguous prefix."""
    runs = records(artifacts)
    exact = [run for run in runs if run.id == which] or [run for run in runs if run.name == which]
    if exact:
        return exact[0]
    begun = [run for run in runs if which and run.id.startswith(which)]
    if len(begun) > 1:
        raise ValueError(f"{which!r} begins the ids of {_listed(begun)}: give more of the id")
    if begun:
        return begun[0]
    near = _nearest(runs, which)
    told = f"; the nearest: {_listed(near)}" if near else ""
    listed = f"give the name or id of one that `alignflow runs {artifacts}` lists"
    raise ValueError(
        f"{artifacts} has no run {which[:80]!r}: {listed}, or another folder (--artifacts){told}"
    )


def pin(artifacts: Path, which: str, pinned: bool) -> RunRecord:
    """Pins or unpins a run, and returns its record. Raises ValueError for the same reasons as `find_run`."""
    found = find_run(artifacts, which)
    file = found.file.with_suffix(PIN)
    if pinned:
        file.touch()
    else:
        file.unlink(missing_ok=True)
    return found


def _nearest(runs: Sequence[RunRecord], which: str) -> list[RunRecord]:
    """Returns at most MAX_NEAREST runs whose id or name resembles `which`; the newest runs if no run does."""
    by_text = {text: run for run in reversed(runs) for text in (run.id, run.name) if text}
    close = difflib.get_close_matches(which, by_text, MAX_NEAREST)
    unique = {by_text[text].id: by_text[text] for text in close}
    return list(unique.values()) or list(runs[:MAX_NEAREST])


def _listed(runs: Sequence[RunRecord]) -> str:
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return ", ".join(run.label for run in runs[:MAX_LISTED]) + more


def kept(
    runs: Sequence[RunRecord], keep_runs: int | None = None, not_before: float | None = None
) -> set[str]:
    """Returns the ids of the runs whose stages are kept. `runs` are sorted newest first.

    Keeps each recipe's newest `keep_runs` runs that had stages, runs that began at `not_before` or later, and
    runs that are pinned, in progress or waiting for a person. Keeps all runs when neither limit is given.
    """
    if keep_runs is None and not_before is None:
        return {run.id for run in runs}
    worked = [run for run in runs if not run.why]
    newest = {
        run.id
        for recipe in {run.recipe for run in runs}
        for run in [run for run in worked if run.recipe == recipe][: keep_runs or 0]
    }
    young = {run.id for run in runs if not_before is not None and run.started >= not_before}
    return (
        newest | young | {run.id for run in runs if run.pinned or run.state == "running" or _waits(run, runs)}
    )


def _waits(run: RunRecord, runs: Sequence[RunRecord]) -> bool:
    """Returns whether a run waits for a person and no later run has its stages. A resumed run gets its own
    record."""
    stages = {stage.run_dir for stage in run.stages}
    later = (other for other in runs if other.recipe == run.recipe and other.started > run.started)
    return run.state == "waits" and not any(
        stages <= {stage.run_dir for stage in other.stages} for other in later
    )


def read(file: Path, held: Callable[[Path], bool] = is_locked) -> RunRecord:
    """Reads a record, which may be `run.json`. An unreadable record has the state `damaged`. `held` returns
    whether a process holds a lock file."""
    recipe, identity = (
        (file.parent.name, f"{file.parent.name}/{RUN}")
        if file.name == RUN
        else (file.parents[1].name, file.stem)
    )
    own = {"file": file, "id": identity, "recipe": recipe, "pinned": file.with_suffix(PIN).exists()}
    own["started"] = file.stat().st_mtime if file.exists() else 0.0
    running = held(file.with_suffix(LOCK))  # checked first: a run records its end before it frees the lock
    try:
        run = RunRecord.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return RunRecord().model_copy(update=own | {"state": "damaged"})
    statuses = {stage.status for stage in run.stages}
    if running:
        state = "running"
    elif run.state or statuses <= {"done", "skipped"}:
        state = run.state or "done"
    elif run.ended is None:
        state = "killed"
    else:
        state = "failed" if "failed" in statuses else "unfinished"
    return run.model_copy(update=own | {"state": state, "started": run.started or own["started"]})
