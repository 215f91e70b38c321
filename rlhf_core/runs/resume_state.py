"""Writes and finds a stage's resume states, `state/step-<n>/`. Only complete states are found."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from rlhf_core.config import Optimised
from rlhf_core.config.training.sharding import TORCH
from rlhf_core.runs.run_dir import STATE, RunDir
from rlhf_core.system.files import sync_to_disk, write_text

LOOP = "loop.json"
LOOK_SECONDS = 0.1
STATE_BYTES = 12  # per trained parameter: the weight and Adam's two moments, in fp32
AVERAGE_BYTES = 4  # per trained parameter with `ema`: its moving average, in fp32


class Resume(NamedTuple):
    """A stored state after `step` optimiser steps (or PPO iterations). `loop`: the state of the training
    loop."""

    step: int
    folder: Path
    loop: dict[str, Any]


class Cadence:
    """Decides when a resume state is due in `folder`. The state holds `parameters` trained parameters, and
    their moving average if `averages` is set.

    A state is due every `steps` steps. If `steps` is 0, one is due when `minutes` have passed since the last
    one (0: never) and it fits on the disk.
    """

    def __init__(self, steps: int, minutes: float, folder: Path, parameters: int, averages: bool = False):
        self.steps = steps
        self.seconds = 60 * minutes
        self._saved = time.monotonic()
        self._folder = folder
        self._bytes = (STATE_BYTES + AVERAGE_BYTES * averages) * parameters

    @property
    def by_clock(self) -> bool:
        """Returns whether states are saved at time intervals."""
        return not self.steps and self.seconds > 0

    def due(self, done: int) -> bool:
        """Returns whether to save after `done` steps. Prints a line when the disk has too little free
        space."""
        if self.steps:
            return done % self.steps == 0
        if not self.by_clock or time.monotonic() - self._saved < self.seconds:
            return False
        free = shutil.disk_usage(self._folder).free
        if free > self._bytes:
            return True
        needed = f"needs up to {self._bytes / 2**30:.1f} GiB and {self._folder} has {free / 2**30:.1f} free"
        print(f"no resume state is kept: it {needed}; free some space, or set save_minutes to 0", flush=True)
        self.saved()  # checks again after another `minutes`
        return False

    def saved(self) -> None:
        """Starts the clock for the next state."""
        self._saved = time.monotonic()


def latest(run: RunDir) -> Resume | None:
    """Returns the newest complete state, or None."""
    states = [folder for folder in (run / STATE).glob("step-*") if (folder / LOOP).is_file()]
    if not states:
        return None
    folder = max(states, key=_step)
    return Resume(_step(folder), folder, json.loads((folder / LOOP).read_text()))


def layout_of(config: Optimised) -> dict[str, int | str]:
    """Returns the training layout that a state records: the ranks of each model, and the recipe's
    `zero_stage`, which may still be `auto` with several ranks."""
    ranks = {name: ranks.world_size for name, ranks in config.trained_ranks.items()}
    sharding = TORCH if config.sharding is None and config.alone else config.sharding
    return {**ranks, "zero_stage": config.zero_stage if sharding is None else sharding.stage}


def kept_zero_stage(run: RunDir, config: Optimised) -> int | None:
    """Returns the ZeRO stage of the newest state if it was written with the ranks in `config`, else None. A
    state can be read by any number of ranks under any ZeRO stage."""
    resume = latest(run)
    kept = resume.loop["layout"] if resume else {}
    same = all(kept.get(name) == ranks.world_size for name, ranks in config.trained_ranks.items())
    return int(kept["zero_stage"]) if kept and same else None


class StateCommit:
    """Waits in a thread until other threads and processes have written the `files` of an open state, then
    closes the state."""

    def __init__(self, run: RunDir, step: int, keep: int, loop: Mapping[str, Any], files: Sequence[str]):
        self._error: BaseException | None = None
        self._state = (run, step, keep, loop)
        self._folder = open_state(run, step, clear=False)
        self._files = [self._folder / file for file in files]
        self._thread = Thread(target=self._work, name="state commit", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not all(file.exists() for file in self._files):
                if not self._folder.is_dir():
                    raise FileNotFoundError(f"{self._folder} was removed before all of it was written")
                time.sleep(LOOK_SECONDS)
            close_state(*self._state)
        except BaseException as error:  # raised in the main thread by `wait`
            self._error = error

    def wait(self) -> None:
        """Returns once the state is complete. Raises the error that ended the thread, such as OSError for a
        full disk. Other writers of the files raise their own errors, so check them first."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def save(
    run: RunDir,
    step: int,
    keep: int,
    loop: Mapping[str, Any],
    write: Callable[[Path], None],
    files: Sequence[str] = (),
) -> StateCommit:
    """Writes a state with `write(folder)` into a temporary folder, and returns the `StateCommit` that renames
    the folder once it also holds `files`, which other processes or threads write. The newest `keep` states
    are kept."""
    write(open_state(run, step, clear=True))
    return StateCommit(run, step, keep, loop, files)


def rank_file(rank: int) -> str:
    """Returns the name of a rank's part of a state."""
    return f"rank-{rank:05d}.safetensors"


def open_state(run: RunDir, step: int, clear: bool) -> Path:
    """Returns the temporary folder of a state. The one rank that passes `clear` creates the folder empty and
    removes the temporary folders of killed attempts."""
    temporary = run / STATE / f".step-{step}"
    if clear:
        for left in (run / STATE).glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
    return temporary


def close_state(run: RunDir, step: int, keep: int, loop: Mapping[str, Any]) -> None:
    """Renames a complete state to its final name and removes all but the newest `keep`."""
    temporary = run / STATE / f".step-{step}"
    final = run / STATE / f"step-{step}"
    write_text(temporary / LOOP, json.dumps(dict(loop)))
    sync_to_disk(temporary)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in sorted((run / STATE).glob("step-*"), key=_step)[:-keep]:
        shutil.rmtree(old)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
