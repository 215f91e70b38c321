"""Resume states of a stage: `state/step-<n>/`, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.stage import STATE, RunDir, settle, write_text

LOOP = "loop.json"
STATE_BYTES = 16  # of a trained parameter: its weight twice, and Adam's two moments in fp32


class Resume(NamedTuple):
    """A stored state: `step` optimiser steps (or PPO iterations) are done; `loop` is what the loop itself keeps."""

    step: int
    folder: Path
    loop: dict[str, Any]


class Cadence:
    """When a resume state of so many trained `parameters` is due in `folder`: after each `steps`; where that is 0, when `minutes` have
    passed since the last one (0: never), and the disk has room for another."""

    def __init__(self, steps: int, minutes: float, folder: Path, parameters: int):
        self.steps, self.seconds, self._saved = steps, 60 * minutes, time.monotonic()
        self._folder, self._bytes = folder, STATE_BYTES * parameters

    @property
    def by_clock(self) -> bool:
        return not self.steps and self.seconds > 0

    def due(self, done: int) -> bool:
        if self.steps:
            return done % self.steps == 0
        if not self.by_clock or time.monotonic() - self._saved < self.seconds:
            return False
        free = shutil.disk_usage(self._folder).free
        if free > self._bytes:
            return True
        told = f"needs up to {self._bytes / 2**30:.1f} GiB and {self._folder} has {free / 2**30:.1f} free"
        print(f"no resume state is kept: it {told}; make room, or set save_minutes to 0", flush=True)
        self.saved()  # looked at again when as much time has passed
        return False

    def saved(self) -> None:
        self._saved = time.monotonic()


def latest(run: RunDir) -> Resume | None:
    """The newest complete state, or None."""
    states = [folder for folder in (run / STATE).glob("step-*") if (folder / LOOP).is_file()]
    if not states:
        return None
    folder = max(states, key=_step)
    return Resume(_step(folder), folder, json.loads((folder / LOOP).read_text()))


def save(run: RunDir, step: int, keep: int, loop: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """Stores a state: `write(folder)` fills a temporary folder, which is renamed when whole. The newest `keep` stay."""
    write(open_state(run, step, clear=True))
    close_state(run, step, keep, loop)


def open_state(run: RunDir, step: int, clear: bool) -> Path:
    """The temporary folder of a state; emptied by the one rank that passes `clear`."""
    temporary = run / STATE / f".step-{step}"
    if clear:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    return temporary


def close_state(run: RunDir, step: int, keep: int, loop: Mapping[str, Any]) -> None:
    """Makes a whole state visible and removes all but the newest `keep`."""
    temporary, final = run / STATE / f".step-{step}", run / STATE / f"step-{step}"
    write_text(temporary / LOOP, json.dumps(dict(loop)))
    settle(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in sorted((run / STATE).glob("step-*"), key=_step)[:-keep]:
        shutil.rmtree(old)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
