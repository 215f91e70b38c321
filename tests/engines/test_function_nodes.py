"""A reward function in processes on two Ray nodes: what its calls see, and what a process that dies leaves.
Ray alone, no models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rlhf_core.cluster.ray_cluster import RayNode, connect
from rlhf_core.rewards.functions.function_nodes import SpreadFunction
from rlhf_core.rewards.reward_contract import RewardError, Sample
from tests.support.micro import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FUNCTION = """
import os

def parents(responses):
    return [float(os.getppid())] * len(responses)

def settings(responses):
    return [float(os.environ["SETTING"])] * len(responses)
"""
SAMPLE = Sample([{"role": "user", "content": "?"}], "yes", {}, True, "? yes")


@pytest.fixture(scope="module")
def other() -> Iterator[RayNode]:
    """A node besides that of this process."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    made.add_node(num_cpus=1, object_store_memory=100 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        connect()
        own = ray.get_runtime_context().get_node_id()
        (node,) = [node for node in ray.nodes() if node["NodeID"] != own]
        yield RayNode(node["NodeID"], "10.0.0.2")
        ray.shutdown()
    made.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FUNCTION)
    return tmp_path / "rewards.py"


def test_calls_go_to_both_nodes_in_turn_and_a_process_that_dies_is_replaced_here(
    file: Path, other: RayNode, capsys: pytest.CaptureFixture[str]
) -> None:
    function = SpreadFunction(file, "parents", 200, 2, [other])
    try:
        first, second, third = (int(function.score([SAMPLE]).rewards[0]) for _ in range(3))
        assert first == third != second == os.getpid()
        assert capsys.readouterr().out == "the reward function parents runs here and on 10.0.0.2\n"
        children = psutil.Process(first).children()
        os.kill(first, signal.SIGKILL)
        assert int(function.score([SAMPLE]).rewards[0]) == os.getpid()
        with pytest.raises(RewardError, match=r"the process on the Ray node 10\.0\.0\.2 ended"):
            function.score([SAMPLE])
        assert [int(function.score([SAMPLE]).rewards[0]) for _ in range(2)] == [os.getpid()] * 2
        wait_until(lambda: not any(child.is_running() for child in children), "the function's process to end")
    finally:
        function.close()


def test_the_function_gets_the_variables_of_the_run(
    file: Path, other: RayNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SETTING", "7")
    function = SpreadFunction(file, "settings", 200, 2, [other])
    try:
        assert [function.score([SAMPLE]).rewards[0] for _ in range(2)] == [7, 7]
    finally:
        function.close()


def test_what_cannot_be_loaded_names_the_node(file: Path, other: RayNode) -> None:
    function = SpreadFunction(file, "nothing", 200, 2, [other])
    try:
        with pytest.raises(
            ValueError, match=r"has no function 'nothing'; correct .* \(on the Ray node 10\.0\.0\.2\)$"
        ):
            function.score([SAMPLE])
        with pytest.raises(
            ValueError, match=r"has no function 'nothing'; correct the name of the reward function$"
        ):
            function.score([SAMPLE])
    finally:
        function.close()
