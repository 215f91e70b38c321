"""Reads growing files: each call reads only the lines appended since the last one, in bounded memory. A
replaced or truncated file is read from its start.

`metrics.jsonl` is appended to while a stage runs and replaced when it resumes (runs/metrics_log.py);
`log.txt` is only appended to (runs/launch.py). The last line is not read until it ends with a newline.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeGuard, TypeVar

CHUNK = 1 << 20
MAX_LINE = 1 << 20
MAX_LOG = 64 << 20  # bytes
TAIL = 64  # bytes before the current position that are compared to detect a replaced file
MAX_POINTS = 600
MAX_METRICS = 500
MARK = re.compile(
    rb"(---|\+\+\+) (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:.* ended after ([\d.]{1,12}) s with code"
    rb" (-?\d{1,5})$)?"
)
STEP = re.compile(rb"step (\d{1,12})/(\d{1,12})(?:\s|$)")
# Progress of stages without steps, in answers sampled, scored or judged.
PARTS = re.compile(
    rb"(?:sampled answers to |scored |.{1,300} \(|.{1,300}: )(\d{1,12}) of (\d{1,12})"
    rb" (?:prompts,|answers$|models\)$|done$)"
)


Seen = TypeVar("Seen")


class Growing(Generic[Seen]):
    """Passes each complete line of a file to `take` once. Calls `restart` first if the file has been
    replaced. Does not follow links.

    `look` returns the result of `snapshot`; any thread may call it.
    """

    most: int | None = None  # at first, read only this many bytes before the end; None: all

    def __init__(self, path: Path):
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._last = b""
        self._rest = b""
        self._cut = False
        self._guard = threading.Lock()
        self._seen: Seen | None = None
        self.restart()

    def look(self) -> Seen:
        """Reads the new lines and returns the state after all lines. Returns the same object as long as
        nothing is added."""
        with self._guard:
            before = self._identity, self._offset
            self.update()
            if self._seen is None or before != (self._identity, self._offset):
                self._seen = self.snapshot()
            return self._seen

    def update(self) -> None:
        """Reads the new lines. A missing or unreadable file counts as empty."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            self._begin(None)
            return
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                self._begin(None)
                return
            identity = about.st_dev, about.st_ino
            if identity != self._identity or about.st_size < self._offset or not self._continues(descriptor):
                self._begin(identity)
                if self.most is not None and about.st_size > self.most:
                    self._offset = about.st_size - self.most
                    self._cut = True
            while chunk := os.pread(descriptor, CHUNK, self._offset):
                self._add(chunk)
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Discards all lines read so far."""

    def take(self, line: bytes) -> None:
        """Receives one line, without its line end."""

    def snapshot(self) -> Seen:
        """Returns the state after all lines, in objects that will not change later."""
        raise NotImplementedError

    def _forget(self) -> None:
        self._offset = 0
        self._last = b""
        self._rest = b""
        self._cut = False

    def _begin(self, identity: tuple[int, int] | None) -> None:
        if self._offset or identity != self._identity:
            self.restart()
        self._identity = identity
        self._forget()

    def _continues(self, descriptor: int) -> bool:
        return os.pread(descriptor, len(self._last), self._offset - len(self._last)) == self._last

    def _add(self, chunk: bytes) -> None:
        self._offset += len(chunk)
        self._last = (self._last + chunk)[-TAIL:]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not self._cut:  # otherwise this is the end of a line whose start was dropped
                self.take(line)
            self._cut = False
        if len(self._rest) > MAX_LINE:
            self._rest = b""
            self._cut = True


class Series:
    """The points of one metric, at most MAX_POINTS; beyond that, neighbours are averaged. Values that are not
    finite are only counted."""

    def __init__(self) -> None:
        self.not_finite = 0
        self.last = math.nan
        self._points: list[tuple[float, float]] = []
        self._group = 1
        self._pending = list[tuple[float, float]]()

    def add(self, step: float, value: float) -> None:
        self.last = value
        if not math.isfinite(value):
            self.not_finite += 1
            return
        self._pending.append((step, value))
        if len(self._pending) >= self._group:
            self._points.append(_mean(self._pending))
            self._pending = []
        if len(self._points) >= MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean(pair) for pair in pairs]
            self._group = 2 * self._group

    def points(self) -> list[tuple[float, float]]:
        """Returns (step, value) points with increasing steps."""
        return [*self._points, *([_mean(self._pending)] if self._pending else [])]


def _mean(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns the last step and the mean value of the points."""
    steps, values = zip(*points, strict=True)
    return steps[-1], sum(values) / len(values)


class Metrics(NamedTuple):
    """The metrics of a stage: for each metric its points, the number of values that are not finite, and the
    last finite value. `step`, `time`: from the last line; `pace`: seconds per step, over the last lines."""

    points: dict[str, list[tuple[float, float]]]
    not_finite: dict[str, int]
    last: dict[str, float]
    step: float | None
    time: float | None
    pace: float | None


class Curves(Growing[Metrics]):
    """Reads the metrics in `metrics.jsonl`."""

    def restart(self) -> None:
        self.series: dict[str, Series] = {}
        self.step: float | None = None
        self.time: float | None = None
        self.pace: float | None = None

    def take(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(found, dict) or not is_number(found.get("step")):
            return
        step = float(found["step"])
        now = found.get("time")
        if not math.isfinite(step) or (self.step is not None and step <= self.step):
            return
        if is_number(now) and self.time is not None and self.step is not None and now > self.time:
            pace = (now - self.time) / (step - self.step)
            self.pace = pace if self.pace is None else 0.8 * self.pace + 0.2 * pace
        self.step, self.time = step, float(now) if is_number(now) else self.time
        for name, value in found.items():
            if (
                name not in ("step", "time")
                and is_number(value)
                and (name in self.series or len(self.series) < MAX_METRICS)
            ):
                self.series.setdefault(name[:200], Series()).add(step, float(value))

    def snapshot(self) -> Metrics:
        points = {name: one.points() for name, one in self.series.items()}
        not_finite = {name: one.not_finite for name, one in self.series.items() if one.not_finite}
        last = {name: one.last for name, one in self.series.items() if math.isfinite(one.last)}
        return Metrics(points, not_finite, last, self.step, self.time, self.pace)


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a JSON value is a number that fits a float."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    )


class Attempt(NamedTuple):
    """A start of a stage's process. `seconds`, `code`: recorded at its end; None while it runs, or if its
    starter was killed."""

    started: float
    seconds: float | None = None
    code: int | None = None


class Log(NamedTuple):
    """The starts of a stage's process, and its progress, (done, all), from the last line `step X/Y` or from
    lines `X of Y` that match PARTS."""

    attempts: tuple[Attempt, ...]
    progress: tuple[int, int] | None


class Attempts(Growing[Log]):
    """Reads the starts and ends in `log.txt`."""

    most = MAX_LOG

    def restart(self) -> None:
        self.attempts: list[Attempt] = []
        self.progress: tuple[int, int] | None = None
        self.has_steps = False

    def take(self, line: bytes) -> None:
        mark = MARK.match(line)
        if mark:
            when = _seconds(mark[2].decode())
            if mark[1] == b"---":
                self.attempts = [*self.attempts[-999:], Attempt(when)]
            elif mark[4] and self.attempts:
                self.attempts[-1] = self.attempts[-1]._replace(seconds=float(mark[3]), code=int(mark[4]))
        elif step := STEP.match(line):
            self.has_steps = True
            self.progress = int(step[1]), int(step[2])
        elif not self.has_steps and (step := PARTS.match(line)):
            self.progress = int(step[1]), int(step[2])

    def snapshot(self) -> Log:
        return Log(tuple(self.attempts), self.progress)


def _seconds(text: str) -> float:
    """Converts the local time in a log to seconds since 1970; returns 0 when it cannot be parsed."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0
