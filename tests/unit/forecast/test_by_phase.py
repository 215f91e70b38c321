"""Memory by phase, of GPUs and hosts, and what is in shares from the start."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO, SFT, Lora, Ranks
from rlhf_core.forecast.by_phase import DIRECT, PROCESS, Phase, by_phase, training_by_phase
from rlhf_core.forecast.hardware import GIB, GPUS, on_nodes
from rlhf_core.forecast.memory import CODE, CONTEXT, FETCHED, Sharding, gpu_peaks, largest_layer, roles
from rlhf_core.forecast.zero_stage import peak_of_training
from rlhf_core.hub.model_config import size_of_config
from tests.benchmarks.published import ALL, LLAMA, ROLES, SHAPES, recipe
from tests.support.measured import ALL_RESIDENT, H100, H200, IN_TURN, LARGE_MODEL, ONE_IN_TORCH, SMALL_MODEL, SPLIT, TWO_APART

BIG = size_of_config(LLAMA | SHAPES["70B"])
NODES = on_nodes(GPUS["h100"], 64, 8, 50e9)


def phases_of(config: PPO, size: Any, gpu: Any, sharding: Sharding = CODE) -> dict[str, Phase]:
    return by_phase(config, arrange(config.placed, config.together), dict.fromkeys(config.groups, size), gpu, sharding)


@pytest.mark.parametrize(
    ("config", "size"),
    [(ONE_IN_TORCH, SMALL_MODEL), (ALL_RESIDENT, SMALL_MODEL), (TWO_APART, SMALL_MODEL), (IN_TURN, LARGE_MODEL), (SPLIT, LARGE_MODEL)],
)
def test_the_fullest_phase_is_the_peak_that_placements_are_judged_by(config: PPO, size: Any) -> None:
    found = phases_of(config, size, H200)
    held = roles(config, dict.fromkeys(config.groups, size), H200.memory)
    peak = max(needed for _, needed in gpu_peaks(config, arrange(config.placed, config.together), held).values())
    computing = max(found[phase].gpu for phase in ("load", "generate", "score", "train"))
    assert computing == pytest.approx(peak)
    assert list(found) == ["start-up", "load", "generate", "score", "train", "gather", "sync", "export", "save"]


def large(**fields: Any) -> PPO:
    ranks = {role: {"num_nodes": 8, "num_ranks_per_node": 8, "gpus": 1.0} for role in ROLES}
    engines = {"num_engines": 16, "tensor_parallel_size": 4, "gpus": 1.0, "gpu_memory_utilization": 0.6, "sleep": True}
    return PPO.model_validate(recipe().model_dump() | ranks | {"colocate_all": True, "vllm": engines, "zero_stage": 3} | fields)


def test_trained_models_are_loaded_in_shares() -> None:
    """Actor and critic: no rank finds more than its share and what is fetched; the reference and the reward model are whole."""
    found, held = phases_of(large(), BIG, NODES), roles(large(), dict.fromkeys(large().groups, BIG), NODES.memory)
    assert held["actor"].starting == held["critic"].starting == FETCHED
    trained, frozen = 2 * (2 * BIG.parameters - BIG.head) / 64, 2 * (2 * BIG.parameters - BIG.head)
    assert found["load"].host - found["score"].host < 8 * (frozen + trained + 9 * largest_layer(BIG)), "two layers of each besides"


def test_frozen_models_and_exports_in_shares() -> None:
    whole, shared = phases_of(large(), BIG, NODES), phases_of(large(ref_reward_shard=True), BIG, NODES)
    assert whole["score"].gpu - shared["score"].gpu > 0.9 * 2 * (2 * BIG.parameters - BIG.head) * 63 / 64 - 8 * largest_layer(BIG)
    assert whole["load"].host - shared["load"].host > 7 * 2 * (2 * BIG.parameters - BIG.head) * 63 / 64
    for found in (whole, shared):
        assert found["export"].host - found["score"].host == GIB, "a group of weights at a time"


def test_adam_and_weights_on_the_host_move_from_the_gpu_to_it() -> None:
    plain, adam, both = (
        phases_of(large(**fields), BIG, NODES, ALL)
        for fields in ({}, {"adam_offload": True}, {"adam_offload": True, "param_offload": True})
    )
    assert adam["train"].gpu < plain["train"].gpu and both["train"].gpu < adam["train"].gpu
    parameters = 2 * BIG.parameters - BIG.head
    assert adam["train"].host - plain["train"].host == pytest.approx(8 * 16 * parameters / 64)
    assert both["train"].host - adam["train"].host == pytest.approx(8 * 2 * parameters / 64)
    assert plain["save"].host > plain["train"].host and adam["save"].host == adam["train"].host


def test_a_copy_on_each_node_takes_an_eighth_of_the_weights() -> None:
    plain, copied = (phases_of(large(zero_hpz=hpz), BIG, NODES, ALL)["train"].gpu for hpz in (False, True))
    assert copied - plain == pytest.approx(2 * (2 * BIG.parameters - BIG.head) / 8)


def test_a_training_stage_tells_its_phases() -> None:
    def sft(**fields: Any) -> SFT:
        return SFT.model_validate(
            {"data": {"sources": "rows.jsonl"}, "dtype": "bfloat16", "ranks": Ranks(num_ranks_per_node=8, gpus=1), **fields}
        )

    found = training_by_phase(sft(), LARGE_MODEL, 3, H100)
    assert max(found["load"].gpu, found["step"].gpu) == pytest.approx(peak_of_training(sft(), LARGE_MODEL, 3, H100.memory))
    assert found["start-up"] == Phase(CONTEXT, 8 * PROCESS)
    assert 2 * LARGE_MODEL.parameters < DIRECT * H100.memory and found["load"].host == found["step"].host, "straight onto the GPU"
    large_load = training_by_phase(sft(), BIG, 3, H100)["load"]
    assert large_load.host < 8 * (PROCESS + 2 * (BIG.parameters / 8 + 2 * largest_layer(BIG))) + 1, "not the model 8 times: over 1 TiB"
    offloaded = training_by_phase(sft(adam_offload=True), LARGE_MODEL, 3, H100)
    assert offloaded["step"].gpu < found["step"].gpu and offloaded["step"].host > found["step"].host
    adapters = training_by_phase(sft(lora=Lora()), LARGE_MODEL, 3, H100)
    assert adapters["save"].host == adapters["step"].host, "a resume state has adapters alone"
