"""Memory by phase, of GPUs and hosts, and what is in shares from the start."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import DPO, KTO, PPO, SFT, Lora, Ranks
from rlhf_core.forecast.by_phase import (
    DIRECT,
    PROCESS,
    PhaseBytes,
    by_phase,
    host_doubts,
    training_by_phase,
    training_host_doubt,
)
from rlhf_core.forecast.hardware import GIB, GPUS, on_nodes
from rlhf_core.forecast.memory import (
    BUCKET,
    CONTEXT,
    FETCHED,
    GROUP,
    gpu_peaks,
    largest_layer,
    peak,
    roles,
    training_phases,
)
from rlhf_core.forecast.zero_stage import peak_of_training, stage_of_training, starts
from rlhf_core.hub.model_config import size_of_config
from rlhf_core.system.gpu_allocator import ROUNDED
from tests.benchmarks.published import LLAMA, ROLES, SHAPES, recipe
from tests.support.measured import (
    ALL_RESIDENT,
    H100,
    H200,
    IN_TURN,
    LARGE_MODEL,
    ONE_IN_TORCH,
    SMALL_MODEL,
    SPLIT,
    TWO_APART,
)

BIG = size_of_config(LLAMA | SHAPES["70B"])
NODES = on_nodes(GPUS["h100"], 64, 8, 50e9)


def phases_of(config: PPO, size: Any, gpu: Any) -> dict[str, PhaseBytes]:
    return by_phase(config, arrange(config.placed, config.together), dict.fromkeys(config.groups, size), gpu)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (ONE_IN_TORCH, SMALL_MODEL),
        (ALL_RESIDENT, SMALL_MODEL),
        (TWO_APART, SMALL_MODEL),
        (IN_TURN, LARGE_MODEL),
        (SPLIT, LARGE_MODEL),
    ],
)
def test_the_fullest_phase_is_the_peak_that_placements_are_judged_by(config: PPO, size: Any) -> None:
    found = phases_of(config, size, H200)
    held = roles(config, dict.fromkeys(config.groups, size), H200.memory)
    fullest = max(
        needed for _, needed in gpu_peaks(config, arrange(config.placed, config.together), held).values()
    )
    assert max(phase.gpu for phase in found.values()) == pytest.approx(fullest)
    assert list(found) == [
        "start-up",
        "load",
        "generate",
        "score",
        "train",
        "gather",
        "sync",
        "export",
        "save",
    ]


def large(**fields: Any) -> PPO:
    ranks = {role: {"num_nodes": 8, "num_ranks_per_node": 8, "gpus": 1.0} for role in ROLES}
    engines = {
        "num_engines": 16,
        "tensor_parallel_size": 4,
        "gpus": 1.0,
        "gpu_memory_utilization": 0.6,
        "sleep": True,
    }
    return PPO.model_validate(
        recipe().model_dump() | ranks | {"colocate_all": True, "engine": engines, "zero_stage": 3} | fields
    )


def test_trained_models_are_loaded_in_shares() -> None:
    """Actor and critic: no rank finds more than its share and what is fetched; the reference and the reward
    model are whole."""
    found = phases_of(large(), BIG, NODES)
    held = roles(large(), dict.fromkeys(large().groups, BIG), NODES.memory)
    assert held["actor"].starting == held["critic"].starting == FETCHED
    trained = 2 * (2 * BIG.parameters - BIG.head) / 64
    frozen = 2 * (2 * BIG.parameters - BIG.head)
    assert found["load"].host - found["score"].host < 8 * (frozen + trained + 9 * largest_layer(BIG)), (
        "two layers of each besides"
    )


def test_frozen_models_and_exports_in_shares() -> None:
    whole = phases_of(large(), BIG, NODES)
    shared = phases_of(large(ref_reward_shard=True), BIG, NODES)
    assert whole["score"].gpu - shared["score"].gpu > 0.9 * 2 * (
        2 * BIG.parameters - BIG.head
    ) * 63 / 64 - 8 * largest_layer(BIG)
    assert whole["load"].host - shared["load"].host > 7 * 2 * (2 * BIG.parameters - BIG.head) * 63 / 64
    for found in (whole, shared):
        assert found["export"].host - found["score"].host == pytest.approx(GROUP + 2 * largest_layer(BIG)), (
            "a group of whole layers"
        )


def test_weights_on_their_way_to_engines_count_where_they_make_the_fullest_phase() -> None:
    """Engines that take most of a GPU, and a model that is small besides: the sync decides whether it
    fits."""
    config = large(ref_reward_shard=True, adam_offload=True, param_offload=True, micro_train_tokens=2048)
    found = phases_of(config, BIG, NODES)
    engine = 0.6 * NODES.memory
    parts = GROUP + 2 * largest_layer(BIG) + 2 * max(BUCKET, 2 * BIG.vocabulary * BIG.hidden)
    assert found["sync"].gpu - found["save"].gpu == pytest.approx(engine + parts)
    assert found["sync"].gpu > max(found[phase].gpu for phase in ("generate", "score", "train"))
    without_load = {phase: held.gpu for phase, held in found.items() if phase != "load"}
    held = roles(config, dict.fromkeys(config.groups, BIG), NODES.memory)
    quick = [process._replace(starting=0.0) for process in held.values()]
    assert (
        peak(quick, released=True, in_turn=True)
        == pytest.approx(max(without_load.values()))
        == pytest.approx(found["sync"].gpu)
    )


def test_adam_and_weights_on_the_host_move_from_the_gpu_to_it() -> None:
    plain, adam, both = (
        phases_of(large(ref_reward_shard=True, **fields), BIG, NODES)
        for fields in ({}, {"adam_offload": True}, {"adam_offload": True, "param_offload": True})
    )
    assert adam["train"].gpu < plain["train"].gpu and both["train"].gpu < adam["train"].gpu
    parameters = 2 * BIG.parameters - BIG.head
    assert 18 <= (adam["train"].host - plain["train"].host) / (8 * parameters / 64) < 18 * 1.2, (
        "pinned blocks are rounded up"
    )
    assert both["train"].host - adam["train"].host == pytest.approx(ROUNDED * 8 * 2 * parameters / 64)
    for found in (plain, adam, both):
        assert found["save"].host - found["train"].host == pytest.approx(8 * 12 * parameters / 64), (
            "a copy of fp32 weights and moments"
        )


@pytest.mark.parametrize(("stage", "gpu", "host"), [(2, 33.4, 171.0), (3, 29.8, 138.0)])
def test_adam_on_the_host_takes_what_was_measured(stage: int, gpu: float, host: float) -> None:
    """SFT of 7.6B on one GPU with passes of 16,384 tokens: GiB of the fullest moment of the steps
    (results/sft-7.6b-offload-*)."""
    fields: dict[str, Any] = {
        "adam_offload": True,
        "micro_train_tokens": 16384,
        "gradient_checkpointing": True,
        "zero_stage": stage,
    }
    fields["deepspeed"] = {"data_types": {"grad_accum_dtype": "bf16"}}  # as it was measured
    step = training_by_phase(sft(ranks=Ranks(gpus=1), **fields), LARGE_MODEL, stage, H200)["step"]
    assert (step.gpu / GIB, step.host / GIB) == pytest.approx((gpu, host), rel=0.1)


def test_a_node_with_less_free_memory_is_doubted() -> None:
    found = training_by_phase(sft(adam_offload=True), LARGE_MODEL, 3, H100)
    needed = max(found["export"].host, found["load"].host) - found["start-up"].host
    assert found["save"].host > needed + found["start-up"].host, (
        "where memory is short a state is written without a copy"
    )
    assert training_host_doubt(found, needed) == ""
    assert (
        f"an estimated {needed / GIB:.1f} GiB on a node with {(needed - GIB) / GIB:.1f} free"
        in training_host_doubt(found, needed - GIB)
    )


def test_each_node_of_ppo_is_doubted_by_what_is_on_it() -> None:
    """The actor on four GPUs of node a, the critic on one of node b: its Adam alone takes much."""
    fields = {
        "actor_ranks": {"num_ranks_per_node": 4, "gpus": 1},
        "critic_ranks": {"gpus": 1},
        "colocate_all": False,
        "zero_stage": 2,
    }
    config = PPO.model_validate(
        recipe().model_dump() | fields | {"adam_offload": True, "ref_reward_offload": False}
    )
    sizes = dict.fromkeys(config.groups, LARGE_MODEL)
    nodes = {"actor": ["a"] * 4, "critic": ["b"], "reference": ["c"], "sampler": ["a"]}

    def doubted(a: float, b: float) -> list[float]:
        told = host_doubts(config, sizes, H200, nodes, {"a": a * GIB, "b": b * GIB})
        return [
            float(estimate) for estimate in re.findall(r"an estimated (\d+\.\d) GiB on a node with", told)
        ]

    assert doubted(1000, 1000) == []
    both = doubted(1, 1)
    assert len(both) == 2 and 0.8 * both[0] < both[1] < both[0], (
        "a rank's share is whole, or a fourth of it in each of four"
    )
    assert doubted(both[0] + 1, both[1] - 1) == [both[1]] and doubted(both[0] - 1, both[1] + 1) == [both[0]]


def test_weights_on_the_host_count_below_adapters_too() -> None:
    plain, adapters = (
        training_by_phase(sft(param_offload=True, **fields), LARGE_MODEL, 3, H100)["step"].host
        for fields in ({}, {"lora": Lora()})
    )
    assert adapters == pytest.approx(plain) and adapters - 8 * PROCESS == pytest.approx(
        ROUNDED * 2 * LARGE_MODEL.parameters
    )


def test_a_copy_on_each_node_takes_an_eighth_of_the_weights() -> None:
    plain, copied = (phases_of(large(zero_hpz=hpz), BIG, NODES)["train"].gpu for hpz in (False, True))
    assert copied - plain == pytest.approx(2 * (2 * BIG.parameters - BIG.head) / 8)


def test_a_copy_on_each_node_is_made_of_a_model_that_every_rank_loads_whole() -> None:
    plain, copied = (
        phases_of(large(zero_hpz=hpz, ref_reward_shard=True), BIG, NODES)["load"] for hpz in (False, True)
    )
    trained = 2 * (2 * BIG.parameters - BIG.head)
    assert copied.gpu > trained > 2 * plain.gpu
    assert copied.host - plain.host > 7 * trained, "8 ranks of a node, with the model each"
    sizes = dict.fromkeys(large().groups, BIG)
    whole, share = (starts(large(zero_hpz=hpz), sizes)["actor"] for hpz in (True, False))
    assert whole == CONTEXT + 2 * BIG.parameters > 10 * share
    ranks = Ranks(num_nodes=8, num_ranks_per_node=8, gpus=1)
    assert (
        peak_of_training(sft(ranks=ranks, zero_hpz=True, micro_train_batch_size=1), BIG, 3, NODES.memory)
        > 2 * BIG.parameters
    )
    assert (
        stage_of_training(
            sft(ranks=ranks, zero_hpz=True, micro_train_batch_size=1), LARGE_MODEL, 10 * NODES.memory
        ).stage
        == 3
    ), "not the lowest that fits"


def test_a_model_whose_weights_are_on_the_host_needs_no_gpu_that_holds_it() -> None:
    alone = starts(sft(ranks=Ranks(gpus=1), param_offload=True), {"sft": BIG})["sft"]
    assert alone == CONTEXT + FETCHED


def sft(**fields: Any) -> SFT:
    return SFT.model_validate(
        {
            "data": {"sources": "rows.jsonl"},
            "dtype": "bfloat16",
            "ranks": Ranks(num_ranks_per_node=8, gpus=1),
            **fields,
        }
    )


def test_a_training_stage_tells_its_phases() -> None:
    found = training_by_phase(sft(), LARGE_MODEL, 3, H100)
    assert max(phase.gpu for phase in found.values()) == pytest.approx(
        peak_of_training(sft(), LARGE_MODEL, 3, H100.memory)
    )
    assert found["start-up"] == PhaseBytes(CONTEXT, 8 * PROCESS)
    assert 2 * LARGE_MODEL.parameters < DIRECT * H100.memory and found["load"].host == found["step"].host, (
        "straight onto the GPU"
    )
    large_load = training_by_phase(sft(), BIG, 3, H100)["load"]
    assert large_load.host < 8 * (PROCESS + 2 * (BIG.parameters / 8 + 2 * largest_layer(BIG))) + 1, (
        "not the model 8 times: over 1 TiB"
    )
    offloaded = training_by_phase(sft(adam_offload=True), LARGE_MODEL, 3, H100)
    assert offloaded["step"].gpu < found["step"].gpu and offloaded["step"].host > found["step"].host
    adapters = training_by_phase(sft(lora=Lora()), LARGE_MODEL, 3, H100)
    assert adapters["save"].host == adapters["step"].host, "a resume state has adapters alone"


def test_the_host_of_a_training_stage_is_that_of_the_ranks_on_a_node() -> None:
    """The recipe says them; `--nodes` is about the GPUs of PPO's placements."""
    ranks = Ranks(num_nodes=2, num_ranks_per_node=4, gpus=1)
    on_fewer = H100._replace(per_node=2)
    assert {
        training_by_phase(sft(ranks=ranks), LARGE_MODEL, 3, gpu)["start-up"].host for gpu in (H100, on_fewer)
    } == {4 * PROCESS}


def test_the_reference_of_dpo_is_cut_as_the_code_cuts_it() -> None:
    ranks = Ranks(num_ranks_per_node=8, gpus=1)
    fields: dict[str, Any] = {
        "data": {"sources": "rows.jsonl"},
        "dtype": "bfloat16",
        "ranks": ranks,
        "micro_train_batch_size": 1,
    }

    def score(stage: int, **more: Any) -> float:
        found = training_phases(DPO.model_validate(fields | more), LARGE_MODEL, stage, H100.memory)
        return found["score"] - found["save"] if "score" in found else 0.0

    weights = 2 * LARGE_MODEL.parameters
    assert score(2, reference="other") - score(2) == pytest.approx(weights), (
        "the model itself scores where none is named"
    )
    assert score(2, reference="other") - score(3, reference="other") == pytest.approx(
        weights * 7 / 8 - FETCHED
    )
    assert score(3, loss="simpo") == 0.0 < score(3)
    on_host = [
        training_by_phase(DPO.model_validate(fields | {"reference": name}), BIG, 2, H100)
        for name in ("other", None)
    ]
    assert on_host[0]["score"].host - on_host[1]["score"].host == 8 * 2 * BIG.parameters, "read by each rank"
    kto = KTO.model_validate(fields | {"reference": "other"})
    assert (
        training_phases(kto, LARGE_MODEL, 3, H100.memory)["score"]
        < training_phases(kto, LARGE_MODEL, 2, H100.memory)["score"]
    )


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_that_is_reset_is_a_second_time_in_host_memory(offload: bool) -> None:
    fields = {"reset_reference_every": 5, "ref_reward_offload": offload}
    plain, reset = (large(**fields | more) for more in ({"reset_reference_every": None}, {}))
    before, after = (phases_of(config, BIG, NODES) for config in (plain, reset))
    more = {phase: after[phase].host - before[phase].host for phase in after}
    assert more.pop("export") == pytest.approx(8 * 2 * BIG.parameters), "one on each of a node's ranks"
    assert not any(more.values()) and [each.gpu for each in after.values()] == [
        each.gpu for each in before.values()
    ]
    nodes, sizes = {"reference": ["a"]}, dict.fromkeys(plain.groups, BIG)
    free = {"a": 2 * BIG.parameters + GIB}
    assert host_doubts(plain, sizes, NODES, nodes, free) == ""
    assert bool(host_doubts(reset, sizes, NODES, nodes, free)) is offload
