"""A process that waits for a run directory: what it says, how often, and when it goes on or gives up."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from rlhf_core.config import SFT
from rlhf_core.runs import run_dir as module
from rlhf_core.runs.run_dir import (
    HOLDER,
    HOLDER_ENV,
    LOCK,
    LOG,
    Outcome,
    RunDir,
    StageRequest,
    run_in_directory,
)
from rlhf_core.system.files import write_text
from rlhf_core.system.machine import MachineLacks
from tests.support.micro import WAIT_SECONDS, wait_until
from tests.support.stage_request import stage_request


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    config = SFT.model_validate({"data": {"sources": "x.jsonl"}})
    run = RunDir(tmp_path / "sft")
    run.prepare(stage_request(config, digest="d"))
    return run


def test_it_names_the_holder_and_repeats_its_last_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAY_SECONDS", 1.0)
    said: list[str] = []
    (run / HOLDER).write_text("run one, process 7, on here since noon")
    write_text(run / LOG, "step 1/40  loss 1\n\n")
    with FileLock(run / LOCK):
        waiting = threading.Thread(target=run.wait, args=("sft", said.append))
        start = time.monotonic()
        waiting.start()
        wait_until(lambda: said, "the first line")
        write_text(run / LOG, "step 20/40\n" + "x" * 9000 + "\n")  # never seen empty
        wait_until(lambda: len(said) > 2 and "xxx" in said[-1], "the last line of the log")
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive() and len(said) <= 1 + time.monotonic() - start, said
    assert said[0].startswith(
        "sft is waited for: run one, process 7, on here since noon works on it and says: step "
    )
    assert said[-1].endswith("says: " + "x" * 300)


def test_it_goes_on_when_there_is_nothing_to_wait_for(run: RunDir) -> None:
    said: list[str] = []
    run.wait("sft", said.append)
    run_in_directory(run.path, lambda request, run: Outcome({}, {}))
    with FileLock(run / LOCK):  # such as a copy to a store
        run.wait("sft", said.append)
    assert said == []


def test_of_two_that_begin_at_once_one_says_that_it_waits(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def work(request: StageRequest, run: RunDir) -> Outcome:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return Outcome({"loss": 1.0}, {})

    both = [threading.Thread(target=run_in_directory, args=(run.path, work)) for _ in range(2)]
    both[0].start()
    assert begun.wait(60)
    begun.clear()
    both[1].start()
    told = ""

    def waits() -> bool:
        nonlocal told
        told += capfd.readouterr().out
        return (
            re.search(r"^process \d+ on .* works on sft: waiting until it is done$", told, re.M) is not None
        )

    wait_until(waits, "the second one to say that it waits")
    assert both[1].is_alive()
    go_on.set()
    for thread in both:
        thread.join(60)
    assert not begun.is_set() and not capfd.readouterr().out, "the second one takes the result"


def test_it_gives_up_when_the_holder_says_nothing_for_a_day(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 2.0)
    (run / HOLDER).write_bytes(b"\xff\n")
    with (
        FileLock(run / LOCK),
        pytest.raises(MachineLacks, match="stage sft is held by \ufffd, without a line in its log for a day"),
    ):
        run.wait("sft", [].append)


def test_who_holds_a_directory(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, told in ((None, "process "), ("run one, process 7,", "run one, process 7, on ")):
        monkeypatch.setenv(HOLDER_ENV, given) if given else monkeypatch.delenv(HOLDER_ENV, raising=False)
        with run.locked(0):
            assert (run / HOLDER).read_text().startswith(told)
        assert not (run / HOLDER).exists()
