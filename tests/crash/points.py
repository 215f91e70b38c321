"""One point of the crash matrix: start, wait for the moment, kill, look what is left, run again, compare.

Everything of a point lies in a folder of its own, which is also the working directory and holds PREFECT_HOME:
that is how its processes are found, whoever their parents are by then. The recipe is given (`Chain`):
run_all.py has one of real stages, tests/flows/test_crash.py one of stages that only write what a stage
writes.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.micro import Serve
from tests.support.programs import logged

ROOT = Path(__file__).parents[2]
WHO = ("flow", "worker", "stage", "ray", "server")
WHEN = {"start": 0.1, "middle": 0.5, "end": 0.9}  # shares of a stage's time, see `moments_of`
END_SECONDS = 40.0  # in which everything must be gone
RETRIED = ("stage", "ray")  # victims after which the flow itself starts the stage once more
OWN_SERVER = ("flow", "server")  # victims whose command starts its own Prefect server


class Moment(NamedTuple):
    """So many lines of the stage's log and metrics, and then so many seconds: seconds alone would be others
    under load."""

    lines: int
    seconds: float


class Chain(NamedTuple):
    """A recipe's name and stages, and what makes a folder with recipe.yaml and all that it needs and gives
    the environment of commands there, with the folder's `home` as PREFECT_HOME."""

    name: str
    stages: tuple[str, ...]
    prepare: Callable[[Path], dict[str, str]]


class Outcome(NamedTuple):
    """`finished`: the stage was done when the first run had ended; `starts` of the stage, by the first run
    and by both."""

    killed: bool
    gone: bool
    code: int
    again: int
    same: bool
    finished: bool
    starts: tuple[int, int]
    once: bool

    @property
    def ok(self) -> bool:
        return self.gone and self.again == 0 and self.same and self.once


def start(
    folder: Path, environment: dict[str, str], stage: str, api: str | None = None
) -> subprocess.Popen[bytes]:
    """`alignflow stage`; without the address of a Prefect server it starts its own."""
    command = [sys.executable, "-m", "flows.cli", "stage", stage, "recipe.yaml"]
    environment = environment | ({"PREFECT_API_URL": api} if api else {})
    return logged(command, folder / "out.txt", cwd=folder, env=environment)


def directory(folder: Path, stage: str) -> Path | None:
    return next(iter(folder.glob(f"artifacts/stages/{stage}-*")), None)


def files(folder: Path, stage: str) -> dict[str, str]:
    """The sha256 of everything a stage made, the path of the folder left out of it: a report of data names
    its files. Empty when it is not done."""
    found = directory(folder, stage)
    if found is None or not (found / "result.json").exists():
        return {}
    names = json.loads((found / "result.json").read_text())["files"]
    place = str(folder.resolve()).encode()
    return {
        f"{found.name}/{name}": hashlib.sha256((found / name).read_bytes().replace(place, b"")).hexdigest()
        for name in names
    }


def lines(folder: Path, stage: str) -> tuple[int, int] | None:
    """How far a stage is: lines of its log and of its metrics, one for each step. None before it holds its
    lock."""
    found = directory(folder, stage)
    if found is None or not (found / ".lock").exists():
        return None
    log, metrics = (
        (found / name).read_bytes().count(b"\n") if (found / name).exists() else 0
        for name in ("log.txt", "metrics.jsonl")
    )
    return log, metrics


def starts(folder: Path) -> dict[str, int]:
    """How often each stage's process was started, by the name of its directory."""
    logs = folder.glob("artifacts/stages/*/log.txt")
    return {
        log.parent.name: sum(row.startswith("--- ") for row in log.read_text().splitlines()) for log in logs
    }


def measure(folder: Path, environment: dict[str, str], stage: str, api: str) -> dict[str, Moment]:
    """Runs a stage undisturbed; the moments to kill it at."""
    trace: list[tuple[float, int, int]] = []
    run = start(folder, environment, stage, api)
    while run.poll() is None and not files(folder, stage):
        now = lines(folder, stage)
        if now is not None and (not trace or now != trace[-1][1:]):
            trace.append((time.monotonic(), *now))
        time.sleep(0.05)
    end = time.monotonic()
    if run.wait() or not trace:
        raise SystemExit(f"the reference's {stage} failed: see {folder / 'out.txt'}")
    return moments_of(trace, end)


def moments_of(trace: list[tuple[float, int, int]], end: float) -> dict[str, Moment]:
    """`trace`: (second, lines of log, steps) from the lock on; `end`: the second of the result.

    The start lies a tenth after the lock; the others between the first step, where there are several, and the
    result: most of a small stage's time goes into imports.
    """
    lock = trace[0][0]
    first = next(row[0] for row in trace if row[2] or row is trace[-1]) if trace[-1][2] > 1 else lock
    moments = {}
    for when, share in WHEN.items():
        since = lock if when == "start" else first
        wanted = since + share * (end - since)
        second, log, steps = trace[bisect.bisect(trace, wanted, key=lambda row: row[0]) - 1]
        moments[when] = Moment(log + steps, round(wanted - second, 3))
    return moments


def reached(folder: Path, stage: str, moment: Moment) -> bool:
    """Whether a stage has as many lines as a moment."""
    now = lines(folder, stage)
    return now is not None and sum(now) >= moment.lines


def point(name: str, chain: Chain, reference: Path, folder: Path, moment: Moment, api: str) -> Outcome:
    """Does one point in a new folder; what became of it. `api`: a Prefect server for all commands but those
    that are to have their own."""
    stage, who, _ = name.split("/")
    environment = chain.prepare(folder)
    for earlier in chain.stages[: chain.stages.index(stage)]:
        source = directory(reference, earlier)
        assert source is not None, f"the reference has no {earlier}"
        copy = folder / "artifacts" / "stages" / source.name
        shutil.copytree(source, copy)
        request = copy / "config.json"  # names its inputs by their paths, as they lie here now
        request.write_text(request.read_text().replace(str(reference.resolve()), str(folder.resolve())))
    prebuilt = starts(folder)
    if who == "worker":
        serve = Serve(folder, environment, "--no-schedule")
        serve.run(serve.ready(), f"alignment/{chain.name}")
        run = serve.process
    else:
        run = start(folder, environment, stage, None if who in OWN_SERVER else api)
    until(lambda: reached(folder, stage, moment) or run.poll() is not None, 300)
    time.sleep(moment.seconds)
    victim = find(run.pid, who)
    if victim is not None:
        print(f"  {name}: killing {' '.join(command_of(victim)).strip()[-100:]}", flush=True)
        victim.kill()
    at_kill = bool(files(folder, stage))
    code = run.wait(600)
    gone = nothing_left(folder)
    finished = bool(files(folder, stage))
    first = starts(folder)
    again = start(folder, environment, stage, api).wait(600)
    gone = nothing_left(folder) and gone
    last = starts(folder)
    own = found.name if (found := directory(folder, stage)) else ""
    by_first = first.get(own, 0)
    by_both = last.get(own, 0)
    once = by_first <= (2 if who in RETRIED and victim and not at_kill else 1) and by_both - by_first == (
        0 if finished else 1
    )
    once = once and prebuilt == {name: count for name, count in last.items() if name != own}
    same = bool(files(folder, stage)) and files(folder, stage) == files(reference, stage)
    return Outcome(victim is not None, gone, code, again, same, finished, (by_first, by_both), once)


def nothing_left(folder: Path) -> bool:
    """Whether all processes of a point have ended in time; else it says which have not."""
    gone = until(lambda: not left(folder), END_SECONDS)
    if not gone:
        print(
            f"  {folder.name}: left are {[' '.join(command_of(process))[-100:] for process in left(folder)]}",
            flush=True,
        )
    return gone


def find(run: int, who: str) -> psutil.Process | None:
    """The process to kill: what was started last of those that fit, of stages first: the next one's process
    may wait beside the one that works. None when the run is over."""
    try:
        command = psutil.Process(run)
        below = command.children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    if who == "flow":
        return command
    fits: dict[str, Callable[[psutil.Process], bool]] = {
        "worker": lambda process: ("prefect", "worker") in pairwise(command_of(process)),
        "stage": lambda process: "rlhf_core.system.reaper" in parent_command(process),
        "ray": lambda process: is_actor(" ".join(command_of(process))),
        "server": lambda process: any(word.endswith("server_process.py") for word in command_of(process)),
    }
    choose = min if who == "stage" else max
    return choose(filter(fits[who], below), key=lambda process: process.create_time(), default=None)


def is_actor(command: str) -> bool:
    return command.startswith("ray::") and not command.startswith("ray::IDLE")


def left(folder: Path) -> list[psutil.Process]:
    """Living processes of a point. Ray's workers overwrite their environment, but not where they work."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("PREFECT_HOME") == str(folder / "home") or process.cwd() == str(
                folder
            )
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def parent_command(process: psutil.Process) -> list[str]:
    parent = process.parent()
    return command_of(parent) if parent else []


def until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
