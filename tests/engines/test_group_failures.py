"""What a group of Ray workers says and leaves when a rank raises, runs out of memory, dies or hangs. Ray
alone, no models."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.pending import RoleFailed, wait_all
from rlhf_core.cluster.ray_cluster import connect, passed_environment, reserve
from rlhf_core.cluster.worker_group import Turns, WorkerGroup
from rlhf_core.config import Ranks
from tests.support.micro import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


SETTINGS = {
    "ALIGNFLOW_CORES": "12",
    "NCCL_NVLS_ENABLE": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True",
}


class Role:
    def pid(self) -> int:
        return os.getpid()

    def raises(self) -> None:
        raise KeyError("gone")

    def wrong(self) -> None:
        arrange(
            {"actor": Ranks(num_ranks_per_node=1), "critic": Ranks(num_ranks_per_node=2)},
            [["actor", "critic"]],
        )

    def unreadable(self) -> None:
        json.loads("{")

    def full(self) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    def waits(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def counts(self, pauses: Sequence[float], then: str = "") -> Iterator[int]:
        for number, pause in enumerate(pauses):
            time.sleep(pause)
            yield number
        if then:
            raise KeyError(then)

    def diverges(self) -> None:
        raise FloatingPointError("step 3 of 9: the loss is nan")

    def works(self, seconds: float) -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(seconds)
        return start, time.monotonic()

    def variables(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Role"]))
    os.environ |= SETTINGS
    somebody_elses = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 77, "object_store_memory": 100 << 20}
    )
    connect()
    two = Ranks(num_ranks_per_node=2, cpus=0.25)
    reservation = reserve(arrange({"critic": two, "actor": two}), 200)
    made = (
        WorkerGroup("critic", reservation, 3),
        WorkerGroup("actor", reservation, 3, expandable_segments=False),
    )
    for pending in [group.build(Role) for group in made]:
        pending.wait(200)
    yield made
    ray.shutdown()
    somebody_elses.shutdown()
    for name in SETTINGS:
        del os.environ[name]


def test_a_cluster_that_runs_on_the_machine_already_is_left_alone(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    assert ray.cluster_resources()["CPU"] == os.cpu_count()


@pytest.mark.parametrize("in_turn", [True, False])
def test_groups_work_in_turn_or_at_once(in_turn: bool, groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    turns = Turns(in_turn)
    first, second = (
        work.wait(100)
        for work in [turns.start(group, "score", Role.works, 1.5 if in_turn else 10.0) for group in groups]
    )
    ended = max(end for _, end in first)
    begun = min(start for start, _ in second)
    assert (begun >= ended) == in_turn


def test_a_failure_before_its_turn_is_named_as_it_is(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    turns = Turns(True)
    raising, working = (
        turns.start(group, "score", method)
        for group, method in zip(groups, (Role.raises, Role.variables), strict=True)
    )
    with pytest.raises(RoleFailed, match=r"critic failed in 'score': KeyError\('gone'\)"):
        raising.wait(100)
    assert len(working.wait(100)) == 2


def test_failures_name_the_role_the_phase_and_what_to_do(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, _ = groups
    with pytest.raises(RoleFailed, match=r"critic failed in 'train': KeyError\('gone'\)"):
        critic.call("train", Role.raises).wait(100)
    with pytest.raises(ValueError, match=r"critic: .*actor.*critic"):
        critic.call("train", Role.wrong).wait(100)
    with pytest.raises(
        RoleFailed,
        match=r"(?s)critic failed in 'train': LibraryError\('JSONDecodeError: Expecting .*json/decoder.py",
    ):
        critic.call("train", Role.unreadable).wait(100)
    with pytest.raises(FloatingPointError, match=r"^critic: step 3 of 9: the loss is nan$"):
        critic.call("train", Role.diverges).wait(100)
    with pytest.raises(
        RoleFailed,
        match=r"critic ran out of GPU memory in 'train': lower micro_train_.* adam_offload.*`alignflow plan`",
    ):
        critic.call("train", Role.full).wait(100)


def test_a_rank_that_does_not_answer_is_named_in_time(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, actor = groups
    start = time.monotonic()
    with pytest.raises(
        RoleFailed, match=r"actor: ranks \[0, 1\] made no progress in 'send weights' for 2 s; raise `timeout`"
    ):
        wait_all([critic.call("score", Role.waits, 0.1), actor.call("send weights", Role.waits, 12)], 2)
    assert time.monotonic() - start < 12
    assert actor.call("again", Role.waits, 0).wait(100) == ["done", "done"]


def test_the_failure_of_one_group_ends_the_wait_for_another(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, actor = groups
    start = time.monotonic()
    with pytest.raises(RoleFailed, match="critic failed in 'send'"):
        wait_all([actor.call("receive", Role.waits, 15), critic.call("send", Role.raises)], 60)
    assert time.monotonic() - start < 15, "it waited for the one who waits for the failed one"
    actor.call("again", Role.waits, 0).wait(100)


def test_a_stream_comes_while_the_ranks_still_work(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, _ = groups
    critic.take_work()
    start = time.monotonic()
    seen = []
    for number in critic.stream("generate", 30, Role.counts, [0.1, 0.1, 10.0]):
        seen.append((number, time.monotonic() - start))
    assert sorted(number for number, _ in seen) == [0, 0, 1, 1, 2, 2], "all that both ranks yield"
    first = seen[0][1]
    last = seen[-1][1]
    assert last - first > 1, "the first is not held back for the last"
    assert 10.2 <= critic.take_work().seconds()["generate"] <= last and critic.take_work().seconds() == {}


def test_a_stream_that_fails_or_falls_silent_names_its_role(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, actor = groups
    with pytest.raises(RoleFailed, match=r"critic failed in 'generate': KeyError\('gone'\)"):
        list(critic.stream("generate", 30, Role.counts, [0.1], "gone"))
    with pytest.raises(
        RoleFailed,
        match=r"actor: ranks \[(0|1|0, 1)\] made no progress in 'generate' for 1 s; raise `timeout`",
    ):
        list(actor.stream("generate", 1, Role.counts, [0.1, 4]))
    assert actor.call("again", Role.waits, 0).wait(100) == ["done", "done"]


def test_a_preparation_that_fails_raises_when_the_role_is_built(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    _, actor = groups
    actor.prepare("no_such_module:function")
    assert actor.call("again", Role.waits, 0).wait(100) == ["done", "done"], "nobody waits for it"
    with pytest.raises(RoleFailed, match=r"actor failed in 'load': ModuleNotFoundError.*no_such_module"):
        actor.build(Role).wait(100)


def test_work_is_timed_by_phase_and_reported_once(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    critic, _ = groups
    critic.take_work()
    for _ in range(2):
        critic.call("score", Role.waits, 0.2).wait(100)
    assert 0.4 <= critic.take_work().seconds()["score"] < 30 and critic.take_work().seconds() == {}


def test_workers_inherit_the_settings_of_the_libraries(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """Among them those that keep NVLink multicast off. The stage's cores are divided by three roles and two
    ranks of each on the node."""
    for seen in groups[0].call("look", Role.variables).wait(100):
        assert seen["NCCL_NVLS_ENABLE"] == "0" and seen["OMP_NUM_THREADS"] == "2"
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    try:
        assert {
            "NCCL_NVLS_ENABLE",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST",
            "NVSHMEM_DISABLE_NVLS",
        } <= passed_environment().keys()
    finally:
        del os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"], os.environ["NVSHMEM_DISABLE_NVLS"]


def test_what_shares_memory_in_other_ways_does_without_growing_segments(
    groups: tuple[WorkerGroup, WorkerGroup],
) -> None:
    critic, actor = (
        group.call("look", Role.variables).wait(100)[0]["PYTORCH_CUDA_ALLOC_CONF"] for group in groups
    )
    assert critic == SETTINGS["PYTORCH_CUDA_ALLOC_CONF"] and actor == "max_split_size_mb:64"


def test_a_rank_that_dies_ends_the_wait_and_is_named(
    groups: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another rank has raised an error before, as one that was connected with it does. Last: the
    group is gone afterwards."""
    monkeypatch.setattr("rlhf_core.cluster.pending.DEATH_SECONDS", 80.0)
    critic, actor = groups
    victim = critic.call("look", Role.pid).wait(100)[1]
    pending = [actor.call("send", Role.raises), critic.call("train", Role.waits, 90)]
    threading.Timer(1, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(RoleFailed, match="a rank of critic died during 'train', often for lack of memory"):
        wait_all(pending, 100)
    wait_until(lambda: not psutil.pid_exists(victim), "the dead rank to be reaped")


def test_a_rank_that_dies_ends_a_stream_and_is_named(groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """Last of all, for the same reason."""
    _, actor = groups
    victim = actor.call("look", Role.pid).wait(100)[1]
    stream = actor.stream("generate", 150, Role.counts, [0, 100])
    assert next(stream) == 0
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RoleFailed, match="a rank of actor died during 'generate', often for lack of memory"):
        list(stream)
