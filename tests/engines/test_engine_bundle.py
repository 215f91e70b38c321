"""Ray places an engine over all GPUs of a node beside ranks that would have filled half of it. The nodes only
say that they have GPUs."""

from __future__ import annotations

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.ray_cluster import connect, leave, reserve
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import EngineConfig, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GPUS = 4


def test_three_ranks_and_an_engine_of_four_fit_two_nodes_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"num_cpus": 2, "num_gpus": GPUS, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    try:
        connect()
        small = {"cpus": 0.1, "gpus": 1}
        layout = arrange(
            {
                "actor": Ranks(num_ranks_per_node=3, **small),
                "sampler": EngineConfig(tensor_parallel_size=GPUS, **small),
            }
        )
        reservation = reserve(layout, 200)
        node_of = placement_group_table(reservation.group)["bundles_to_node_id"]
        nodes = {name: {node_of[slot.bundle] for slot in slots} for name, slots in reservation.slots.items()}
        assert len(nodes["actor"]) == len(nodes["sampler"]) == 1 and nodes["actor"] != nodes["sampler"]
        engine = WorkerGroup("sampler", reservation, 1, span=GPUS)
        held = ray.get([process.gpu_ids.remote() for process in engine._processes], timeout=200)
        assert engine.world_size == 1 and sorted(gpu for each in held for gpu in each) == ["0", "1", "2", "3"]
        with pytest.raises(
            ValueError,
            match=(
                r"lacks a node with 0\.8 CPUs and 8 GPUs \(the largest have 2 CPUs, 4 GPUs\) for sampler 8 x"
            ),
        ):
            reserve(arrange({"sampler": EngineConfig(tensor_parallel_size=2 * GPUS, **small)}), 30)
    finally:
        leave()
        made.shutdown()
