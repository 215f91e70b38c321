"""Cancels or kills runs of `alignflow serve`: all processes end, no stage is marked done, the next run
finishes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tasks import server_process
from tests.support import micro
from tests.support.micro import Serve, ask, wait_until
from tests.support.programs import alive

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
LIMIT_SECONDS = 40  # until all processes must have ended


class Working:
    """A run with a stage in progress. `seed` makes its digests unique."""

    def __init__(self, serve: Serve, api: str, seed: int, stage: str = "sft"):
        self.serve = serve
        self.api = api
        self.seed = seed
        slow(serve.folder, stage)
        self.run = serve.run(api, "alignment/micro", overrides=[f"seed={seed}"])
        before = len(micro.attempts(serve.folder))
        wait_until(lambda: stage in micro.begun(serve.folder)[before:], f"{stage} to begin", told=serve.told)
        _, self.digest, pid = micro.attempts(serve.folder)[-1]
        self.stage = psutil.Process(pid)
        wait_until(self.stage.children, "the stage to start its child")
        reaper = self.stage.parent()
        assert reaper is not None and "rlhf_core.system.reaper" in reaper.cmdline()
        flow = reaper.parent()
        assert flow is not None and "prefect.engine" in flow.cmdline()
        self.flow, self.all = flow, [flow, reaper, self.stage, *self.stage.children()]

    def gone(self) -> None:
        start = time.monotonic()
        wait_until(
            lambda: not [p for p in self.all if alive(p)],
            "all processes of the run to end",
            LIMIT_SECONDS,
            self.serve.told,
        )
        print(f"gone after {time.monotonic() - start:.1f} s")
        (folder,) = (self.serve.folder / "artifacts" / "stages").glob(f"*-{self.digest}")
        assert not (folder / "result.json").exists()

    def ends_as(self, *states: str, seconds: float = micro.WAIT_SECONDS) -> None:
        def state() -> str:
            return self.serve.state(self.api, self.run)

        wait_until(
            lambda: state() in states,
            f"the state {states}",
            seconds,
            lambda: f"{state()}\n{self.serve.told()}",
        )

    def again(self, serve: Serve, api: str) -> None:
        """Checks that the next run of the same recipe finishes and repeats no finished stage."""
        slow(serve.folder)
        run = serve.run(api, "alignment/micro", overrides=[f"seed={self.seed}"])
        serve.reaches(api, run, "COMPLETED")
        done = [name for name, digest, _ in micro.attempts(serve.folder) if digest == self.digest]
        assert len(done) == 2, "the stage that was cut off, once more and no more"


def slow(folder: Path, *stages: str) -> None:
    (folder / "slow.json").write_text(json.dumps({"stubborn": True, **dict.fromkeys(stages, "middle")}))


@pytest.fixture
def starts() -> Iterator[list[Serve]]:
    """Yields a list; each `serve` in it is stopped at the end of the test."""
    started: list[Serve] = []
    yield started
    for serve in started:
        if serve.process.poll() is None:
            serve.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, str]]:
    folder = tmp_path_factory.mktemp("cancel") / "here"
    serve = Serve(folder, micro.build(folder), "--no-schedule")
    try:
        yield serve, serve.ready()
    finally:
        if serve.process.poll() is None:
            serve.stop()
        wait_until(
            lambda: not micro.left(folder), "all processes to end", told=lambda: str(micro.left(folder))
        )


def test_cancelled_by_the_command(served: tuple[Serve, str]) -> None:
    serve, api = served
    work = Working(serve, api, 1)
    command = [sys.executable, "-m", "prefect", "flow-run", "cancel", work.run]
    subprocess.run(command, env=os.environ | micro.client(api), check=True, timeout=60, capture_output=True)
    work.gone()
    work.ends_as("CANCELLED")
    work.again(serve, api)


def test_cancelled_by_the_api_in_a_later_stage(served: tuple[Serve, str]) -> None:
    serve, api = served
    work = Working(serve, api, 2, "loop.round1.dpo")
    ask(api, f"/flow_runs/{work.run}/set_state", {"state": {"type": "CANCELLING"}})
    work.gone()
    work.ends_as("CANCELLED")
    work.again(serve, api)


def test_a_killed_flow_ends_its_stage(served: tuple[Serve, str]) -> None:
    serve, api = served
    work = Working(serve, api, 3)
    work.flow.kill()
    work.gone()
    work.ends_as("CRASHED")
    work.again(serve, api)


def test_all_processes_end_when_serve_or_one_of_them_ends(tmp_path: Path, starts: list[Serve]) -> None:
    """Each time the next `serve` on the same home finds the interrupted run and finishes its work."""
    folder = tmp_path / "here"
    environment = micro.build(folder)
    work: Working | None = None
    codes = {"worker": 3, "server": 3, "serve": -9, "ctrl-c": 130}
    for seed, (who, code) in enumerate(codes.items(), start=1):
        serve = Serve(folder, environment, "--no-schedule")
        starts.append(serve)
        api = serve.ready()
        if work:
            assert serve.state(api, work.run) in (
                "CRASHED",
                "CANCELLED",
                "FAILED",
            ), "a run of yesterday does not stay Running"
            work.again(serve, api)
        work = Working(serve, api, seed)
        if who == "serve":
            serve.process.kill()
        elif who == "ctrl-c":
            serve.process.send_signal(signal.SIGINT)
        else:
            children = psutil.Process(serve.process.pid).children(recursive=True)
            of = {"worker": ("prefect", "worker"), "server": ("-P", server_process.__file__)}[who]
            next(child for child in children if of in pairwise(child.cmdline())).kill()
        work.gone()
        assert serve.process.wait(timeout=60) == code, serve.told()
        wait_until(
            lambda: not micro.left(folder),
            "all processes to end",
            LIMIT_SECONDS,
            lambda: str(micro.left(folder)),
        )
        assert "Traceback" not in (folder / "serve.txt").read_text()
