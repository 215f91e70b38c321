"""Reads an artifacts folder for the dashboard. Writes nothing, does not follow links, and treats damaged or
huge files as missing.

File contents are cached by path, inode, size and mtime, for a bounded number of files, so that an open page
costs little while nothing changes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, TypeVar

from evaluation.dashboard.growing import Attempts, Curves, Growing, Log, Metrics
from evaluation.dashboard.locks import Locks
from evaluation.report.rollouts.answer_rows import keys_of
from rlhf_core.runs.run_dir import LOCK, LOG, METRICS, REQUEST, RESULT
from rlhf_core.runs.run_records import LOCK as RUN_LOCK
from rlhf_core.runs.run_records import PAGE, PIN, RUNS, RunRecord, read, records
from rlhf_core.system.files import tail

FRESH = 180.0  # seconds
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
STAGES = "stages"
MAX_JSON = 16 << 20  # size limit, in bytes, of a file that is read whole
MAX_FILES = 8192
MAX_GROWING = 256  # growing files kept in memory
Identity = tuple[int, int, int]
Found = TypeVar("Found")
Reader = TypeVar("Reader", bound=Growing[Any])


class Missing(LookupError):
    """Raised when there is no such run or stage."""


class Folder:
    """An artifacts folder. Methods may be called from any thread."""

    def __init__(self, artifacts: Path):
        self.path = artifacts.absolute()
        self._files: OrderedDict[Any, Any] = OrderedDict()
        self._growing: OrderedDict[Path, Growing[Any]] = OrderedDict()
        self._guard = threading.Lock()
        self.locks = Locks()

    def look(self) -> None:
        """Refreshes the set of held locks. Call it before building a page."""
        self.locks = Locks()

    def stage(self, name: str) -> Path:
        """Returns a run directory. Raises Missing when `stages` has no directory of this name."""
        path = self.path / STAGES / name
        if not NAME.fullmatch(name) or not _is(path, stat.S_ISDIR):
            raise Missing(name)
        return path

    def requests(self, without: Container[str] = ()) -> dict[str, dict[str, Any]]:
        """Returns the requests of all run directories that have a request, by the directory's name, except
        the directories in `without`."""
        try:
            names = sorted(
                entry.name for entry in os.scandir(self.path / STAGES) if entry.is_dir(follow_symlinks=False)
            )
        except OSError:
            return {}
        found = (
            (name, self.request(self.path / STAGES / name))
            for name in names
            if NAME.fullmatch(name) and name not in without
        )
        return {name: request for name, request in found if request}

    def request(self, run_dir: Path) -> dict[str, Any]:
        """Returns a stage's `config.json`; {} when it is missing, damaged, or not the request of a stage."""
        found = self.json(run_dir / REQUEST)
        kinds = {"name": str, "digest": str, "config": dict, "inputs": dict}
        whole = all(isinstance(found.get(key), kind) for key, kind in kinds.items()) and isinstance(
            found["config"].get("stage"), str
        )
        return found if whole else {}

    def runs(self) -> list[RunRecord]:
        """Returns the recorded runs, newest first."""
        return records(self.path, self._run)

    def run(self, recipe: str, identity: str) -> RunRecord:
        """Returns a recorded run. Raises Missing when there is none."""
        found = next(
            (run for run in self.runs() if (recipe_of(run), key_of(run)) == (recipe, identity)), None
        )
        if found is None:
            raise Missing(f"{recipe}/{identity}")
        return found

    def report(self, recipe: str, identity: str = "") -> Path | None:
        """Returns the report of a run or, without an id, of the recipe's last run; None when there is
        none."""
        home = self.path / recipe
        if not NAME.fullmatch(recipe) or not _is(home, stat.S_ISDIR):
            return None
        if not identity:
            file = home / "report.html"
        elif NAME.fullmatch(identity) and _is(home / RUNS, stat.S_ISDIR):
            file = home / RUNS / f"{identity}{PAGE}"
        else:
            return None
        return file if _is(file, stat.S_ISREG) else None

    def json(self, file: Path) -> dict[str, Any]:
        """Returns the JSON object in a file, like `read_json`. Also returns {} when the file is a link or
        larger than MAX_JSON bytes."""
        return self._kept(file, ("json",), lambda: _object(file))

    def keys(self, file: Path) -> list[str]:
        """Returns the keys of an iteration's recorded answers, like `keys_of`."""
        return self._kept(file, ("keys",), lambda: keys_of(file))

    def curves(self, run_dir: Path) -> Metrics:
        """Returns the metrics that a stage has written so far."""
        return self._growing_file(run_dir / METRICS, Curves).look()

    def attempts(self, run_dir: Path) -> Log:
        """Returns the starts and ends of a stage's process, and its progress, as its current log records
        them."""
        return self._growing_file(run_dir / LOG, Attempts).look()

    def tail(self, file: Path, lines: int = 1) -> str:
        """Returns the last lines of a text file, at most 20,000 bytes; '' unless it is a regular file."""
        return tail(file, lines) if _is(file, stat.S_ISREG) else ""

    def held(self, run_dir: Path) -> bool:
        """Returns whether a process on this machine is running a stage."""
        return self.locks.held(run_dir / LOCK)

    def changed(self, run_dir: Path) -> float | None:
        """Returns the time when the files of a stage were last written, in seconds since 1970; None when
        there are none."""
        times = [
            found[2] for name in (REQUEST, METRICS, LOG, RESULT) if (found := identity_of(run_dir / name))
        ]
        return max(times) / 1e9 if times else None

    def fresh(self, run_dir: Path) -> bool:
        """Returns whether the files of a stage were written less than FRESH seconds ago."""
        return time.time() - (self.changed(run_dir) or 0) < FRESH

    def _run(self, file: Path) -> RunRecord:
        running = self.locks.held(file.with_suffix(RUN_LOCK))
        pinned = file.with_suffix(PIN).exists()
        if not _is(file, stat.S_ISREG) or not NAME.fullmatch(file.stem):
            return RunRecord(file=file, id="damaged", recipe="damaged", state="damaged")
        found = self._kept(file, ("run", running, pinned), lambda: read(file, lambda _: running))
        elsewhere = found.state == "killed" and found.host not in ("", socket.gethostname())
        if elsewhere and any(self.fresh(self.path / stage.run_dir) for stage in found.stages):
            # judged by its files alone, because another machine's locks cannot be seen from here
            return found.model_copy(update={"state": "running"})
        return found

    def _kept(self, file: Path, what: tuple[object, ...], make: Callable[[], Found]) -> Found:
        key = str(file), what
        identity = identity_of(file)
        with self._guard:
            known = self._files.get(key)
        if known is not None and known[0] == identity:
            return known[1]
        found = make()
        with self._guard:
            self._files[key] = identity, found
            self._files.move_to_end(key)
            while len(self._files) > MAX_FILES:
                self._files.popitem(last=False)
        return found

    def _growing_file(self, file: Path, kind: type[Reader]) -> Reader:
        with self._guard:
            found = self._growing.pop(file, None)
            if not isinstance(found, kind):
                found = kind(file)
            self._growing[file] = found
            while len(self._growing) > MAX_GROWING:
                self._growing.popitem(last=False)
        return found


def key_of(run: RunRecord) -> str:
    """Returns the key that identifies a run in an address: its id, or `last` for a recipe's `run.json`, which
    has no id."""
    return run.file.stem if run.file.parent.name == "runs" else "last"


def recipe_of(run: RunRecord) -> str:
    """Returns the name of the recipe folder that holds the record."""
    return (run.file.parents[1] if run.file.parent.name == "runs" else run.file.parent).name


def identity_of(file: Path) -> Identity | None:
    """Returns the inode, size and mtime of a file, which change when it is written to or replaced; None when
    it is missing."""
    try:
        about = file.lstat()
    except (OSError, ValueError):
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def inside(folder: Path, pattern: str) -> Iterator[Path]:
    """Yields the regular files in a folder that match a pattern."""
    yield from (file for file in sorted(folder.glob(pattern)) if _is(file, stat.S_ISREG))


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _object(file: Path) -> dict[str, Any]:
    if not _is(file, stat.S_ISREG) or file.lstat().st_size > MAX_JSON:
        return {}
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
