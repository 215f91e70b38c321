"""How long a wait for a group of Ray workers lasts: as long as each rank makes progress, and `timeout`
seconds longer. No models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlhf_core.cluster import progress_watch
from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.pending import RoleFailed
from rlhf_core.cluster.ray_cluster import connect, reserve
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import Ranks
from rlhf_core.system import progress
from rlhf_core.system.machine import NodeLost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TIMEOUT = 8  # seconds, so that a busy machine is no silence
LONG = 16.0


class Role:
    def pid(self) -> int:
        return os.getpid()

    def works(self, seconds: float, then_hangs: float = 0.0) -> str:
        for _ in range(int(seconds / 0.5)):
            time.sleep(0.5)
            progress.made()
        time.sleep(then_hangs)
        return "done"

    def writes(self, folder: str, seconds: float) -> str:
        with progress.files(Path(folder)), (Path(folder) / f"{os.getpid()}.bin").open("wb") as file:
            for _ in range(int(seconds / 0.5)):
                time.sleep(0.5)
                file.write(b"x" * 1000)
                file.flush()
        return "done"

    def waits_for_a_child(self, seconds: float) -> str:
        """As an engine over several GPUs does, whose work is in processes of its own."""
        work = (
            f"import time\nfrom rlhf_core.system import progress\nfor _ in range({int(seconds / 0.5)}):"
            " time.sleep(0.5), progress.made()"
        )
        subprocess.run([sys.executable, "-c", work], check=True)
        return "done"

    def first_alone(self, seconds: float) -> str:
        """As a rank that reads data or writes a model while the others wait for it in a barrier."""
        if os.environ["RANK"] == "0":
            return self.works(seconds)
        time.sleep(seconds)
        return "done"

    def answers(self, seconds: float) -> Iterator[str]:
        yield self.works(seconds)


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """Ranks apart, and together."""
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Role"]))
    connect()
    two = Ranks(num_ranks_per_node=2, cpus=0.25)
    reservation = reserve(arrange({"actor": two, "sft": two}), 200)
    made = WorkerGroup("actor", reservation, 1), WorkerGroup("sft", reservation, 1, together=True)
    for pending in [group.build(Role) for group in made]:
        pending.wait(200)
    yield made
    ray.shutdown()


@pytest.fixture
def group(groups: tuple[WorkerGroup, WorkerGroup]) -> WorkerGroup:
    return groups[0]


def test_work_that_makes_progress_may_take_longer_than_the_timeout(
    group: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the log shows what was done."""
    monkeypatch.setattr(progress_watch, "SHOWN_SECONDS", LONG / 2)
    start = time.monotonic()
    assert group.call("train", Role.works, LONG).wait(TIMEOUT) == ["done", "done"]
    assert group.call("save", Role.writes, str(tmp_path), LONG).wait(TIMEOUT) == ["done", "done"]
    assert list(group.stream("generate", TIMEOUT, Role.answers, LONG)) == ["done", "done"]
    assert group.call("receive weights", Role.waits_for_a_child, LONG).wait(TIMEOUT) == ["done", "done"]
    assert time.monotonic() - start > 4 * LONG
    shown = capfd.readouterr().out
    for phase in ("train", "generate", "receive weights"):
        assert re.search(rf"^actor in '{phase}': [1-9]\d* parts of work in \d+ s$", shown, re.MULTILINE), (
            shown
        )


def test_ranks_that_finished_may_wait_for_whoever_takes_their_answers(group: WorkerGroup) -> None:
    stream = group.stream("generate", TIMEOUT, Role.answers, 0.5)
    assert next(stream) == "done"
    time.sleep(TIMEOUT + 1)
    assert next(stream) == "done"


def test_a_rank_that_hangs_after_some_work_is_named_in_time(group: WorkerGroup) -> None:
    start = time.monotonic()
    with pytest.raises(
        RoleFailed, match=r"actor: ranks \[(0|1|0, 1)\] made no progress in 'train' for 8 s; raise `timeout`"
    ):
        group.call("train", Role.works, 2.0, 20.0).wait(TIMEOUT)
    assert 2 + TIMEOUT - 1 < time.monotonic() - start < 2 + 20, "it does not wait for the end of the work"
    assert group.call("again", Role.works, 0).wait(100) == ["done", "done"]


def test_ranks_that_work_together_may_wait_for_one_of_them(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    apart, together = groups
    assert together.call("train", Role.first_alone, LONG).wait(TIMEOUT) == ["done", "done"]
    with pytest.raises(
        RoleFailed,
        match=(
            r"sft: ranks \[0, 1\] made no progress in 'train' for 8 s; .* start the stage again: it resumes"
        ),
    ):
        together.call("train", Role.works, 2.0, 20.0).wait(TIMEOUT)
    with pytest.raises(RoleFailed, match=r"actor: ranks \[1\] made no progress in 'train' for 8 s"):
        apart.call("train", Role.first_alone, LONG).wait(TIMEOUT)
    assert apart.call("again", Role.works, 0).wait(100) == ["done", "done"]


def test_a_rank_that_is_stopped_is_named_while_the_other_works(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the log, then by the error. Last: the stopped rank is killed."""
    for module in ("progress_watch", "pending"):
        monkeypatch.setattr(f"rlhf_core.cluster.{module}.NOTICE_SECONDS", 5.0)
    victim = group.call("look", Role.pid).wait(100)[1]
    start = time.monotonic()
    pending = group.call("generate", Role.works, 40.0)
    time.sleep(1)
    os.kill(victim, signal.SIGSTOP)
    try:
        with pytest.raises(RoleFailed, match=r"actor: ranks \[1\] made no progress in 'generate' for 8 s"):
            pending.wait(TIMEOUT)
        assert time.monotonic() - start < 40, "it does not wait for the other"
    finally:
        os.kill(victim, signal.SIGKILL)
    told = "for 5 s: the process works on something long, or is stopped; the wait ends after 8 s"
    assert capfd.readouterr().out.count(f"actor: ranks [1] made no progress in 'generate' {told}\n") == 1


def test_a_raylet_that_dies_is_one_sentence(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """After all others: the cluster is gone."""
    _, together = groups
    pending = together.call("train", Role.works, 60.0)
    (raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
    raylet.kill()
    with pytest.raises(NodeLost) as refused:
        pending.wait(60)
    reason = "its raylet was stopped or killed, often for lack of memory; start the stage again"
    assert str(refused.value) == f"a Ray node (127.0.0.1) ended during 'train' of sft: {reason}"
