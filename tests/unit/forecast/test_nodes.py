"""What is sent between GPUs and nodes, and the command's options for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.app import main
from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.hardware import GPUS, LINK, gather_seconds, nodes_of, on_nodes
from rlhf_core.forecast.placement_options import options_on
from rlhf_core.forecast.seconds import Sending, beside, phases, phases_as_range, sending
from rlhf_core.hub.model_config import size_of_config
from tests.benchmarks.published import LLAMA, ROLES, SHAPES, recipe

BIG = size_of_config(LLAMA | SHAPES["70B"])
SEVEN = size_of_config(LLAMA | SHAPES["7B"])


def test_known_gpus_have_the_measured_share_of_what_is_published() -> None:
    assert (GPUS["h200"].flops, GPUS["h100"].flops) == (770e12, 770e12)
    assert (GPUS["h200"].bandwidth, GPUS["h100"].bandwidth) == (4.3e12, 3.0e12)
    assert (
        GPUS["a800"]._replace(link=0) == GPUS["a100"]._replace(link=0)
        and GPUS["a800"].link < GPUS["a100"].link
    )


def test_a_ring_takes_the_slower_of_both_links() -> None:
    gpu = on_nodes(GPUS["h100"], 16, 2, 50e9)
    assert nodes_of(8, gpu) == 1 and nodes_of(9, gpu) == 2
    assert gather_seconds(64e9, 1, gpu) == 0.0
    assert gather_seconds(64e9, 8, gpu) == pytest.approx(56e9 / (450e9 * LINK))
    assert gather_seconds(64e9, 16, gpu) == pytest.approx(60e9 / (50e9 * LINK))
    with pytest.raises(ValueError, match="--nodes 3: 16 GPUs do not divide by it"):
        on_nodes(GPUS["h100"], 16, 3, None)


def test_sending_happens_beside_computing_or_not() -> None:
    assert [beside(3.0, 2.0, exposed) for exposed in (0.0, 0.5, 1.0)] == [3.0, 4.0, 5.0]


def on(count: int, **fields: Any) -> PPO:
    nodes = max(1, count // 8)
    ranks = {role: {"num_nodes": nodes, "num_ranks_per_node": count // nodes, "gpus": 1.0} for role in ROLES}
    engines = {
        "num_engines": count // 4,
        "tensor_parallel_size": 4,
        "gpus": 1.0,
        "gpu_memory_utilization": 0.6,
        "sleep": True,
    }
    return PPO.model_validate(
        recipe().model_dump() | ranks | {"colocate_all": True, "engine": engines, "zero_stage": 3, **fields}
    )


def test_zero_sends_what_its_stage_says() -> None:
    gpu = on_nodes(GPUS["h100"], 64, 8, 50e9)
    whole = gather_seconds(2 * BIG.parameters, 64, gpu)
    three = sending(on(64), "actor", BIG, gpu)
    assert (
        three.scoring == pytest.approx(whole)
        and three.training == pytest.approx(3 * whole)
        and three.step == 0
    )
    copied = sending(on(64, zero_hpz=True), "actor", BIG, gpu)
    assert (
        copied.training == pytest.approx(2 * whole + gather_seconds(2 * BIG.parameters, 8, gpu))
        and copied.training < three.training
    )
    two, one = (sending(on(64, zero_stage=stage), "actor", BIG, gpu) for stage in (2, 1))
    assert (two.training, two.step) == pytest.approx((whole, whole)) and (
        one.training,
        one.step,
    ) == pytest.approx((0.0, 2 * whole))
    read = 2 * BIG.parameters / 64 / gpu.host
    assert sending(on(64, param_offload=True), "actor", BIG, gpu).training == pytest.approx(
        3 * whole + 2 * read
    )
    frozen = on(64, ref_reward_offload=True)
    assert sending(on(64), "reference", BIG, gpu) == Sending()
    assert sending(frozen, "reference", BIG, gpu) == Sending(once=2 * BIG.parameters / gpu.host), (
        "each rank reads it whole, once"
    )
    shared = on(64, ref_reward_shard=True)
    assert sending(shared, "reference", BIG, gpu) == Sending(scoring=whole), (
        "in shares: gathered for each pass"
    )
    adapters = sending(on(64, lora={}), "actor", BIG, gpu)
    assert adapters.training == pytest.approx(2 * whole), "no gradients of the weights"


def test_a_slower_network_costs_more_and_one_node_has_none() -> None:
    def seconds(count: int, network: float) -> dict[str, float]:
        config = on(count)
        gpu = on_nodes(GPUS["h100"], count, max(1, count // 8), network)
        return phases(config, arrange(config.placed, config.together), dict.fromkeys(config.groups, BIG), gpu)

    assert seconds(64, 12.5e9)["train"] > seconds(64, 50e9)["train"] > seconds(64, 400e9)["train"]
    assert seconds(8, 12.5e9) == seconds(8, 400e9)


def test_the_range_contains_the_typical_seconds() -> None:
    config = on(64)
    gpu = on_nodes(GPUS["h100"], 64, 8, 50e9)
    found = phases_as_range(
        config, arrange(config.placed, config.together), dict.fromkeys(config.groups, BIG), gpu
    )
    assert all(found.fast[phase] <= found.typical[phase] <= found.slow[phase] for phase in found.typical)
    assert found.fast["train"] < found.typical["train"] < found.slow["train"]


def test_engines_take_more_gpus_of_a_node_for_a_model_that_is_too_large_for_one() -> None:
    gpu = on_nodes(GPUS["a800"], 32, 4, 100e9)
    over = {
        name: fields["engine"]["tensor_parallel_size"]
        for name, fields in options_on(recipe(), 32, BIG, gpu).items()
    }
    assert over["all together"] == 4 and min(over.values()) == 2, (
        "45 % of a GPU beside models, 90 % of its own"
    )
    small = options_on(recipe(), 32, SEVEN, gpu)
    assert {fields["engine"]["tensor_parallel_size"] for fields in small.values()} == {1}
    assert small["all together"]["actor_ranks"] == {
        "num_nodes": 4,
        "num_ranks_per_node": 8,
        "cpus": 1.0,
        "gpus": 1.0,
    }


def test_the_command_takes_nodes_and_tells_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA | SHAPES["7B"]))
    (tmp_path / "reward.py").write_text("def score(responses): return [0.0 for _ in responses]\n")
    stage = recipe().model_dump(mode="json", exclude_defaults=True) | {
        "stage": "ppo",
        "actor": "base",
        "critic": "base",
    }
    stage["reward"] = f"{tmp_path}/reward.py:score"
    stage["prompts"] = {"sources": str(tmp_path / "p.jsonl")}
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    sft = {
        "stage": "sft",
        "model": "base",
        "data": {"sources": str(tmp_path / "p.jsonl")},
        "dtype": "bfloat16",
        "ranks": {"gpus": 1},
    }
    content = {
        "name": "big",
        "base_model": str(tmp_path / "base"),
        "artifacts": str(tmp_path / "out"),
        "stages": {"sft": sft, "ppo": stage},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    command = ["plan", str(tmp_path / "recipe.yaml"), "--gpus", "16", "--gpu", "a800", "--nodes", "2"]
    assert main([*command, "--network", "100"]) == 0
    told = capsys.readouterr().out
    assert (
        "2 nodes with 100 GB/s between them" in told
        and "GiB, host of a node" in told
        and "per iteration" in told
    )
    assert "GiB per GPU / per host of a node: start-up 0.6 / 2.0, load" in told
    ranks = "stages.ppo.actor_ranks={num_nodes: 4, num_ranks_per_node: 4, gpus: 1}"
    assert main([*command[:2], ranks, *command[2:-2]]) == 0
    assert "4 nodes with 50 GB/s between them" in capsys.readouterr().out, "as the recipe says"
    assert main([*command[:-1], "3"]) == 2
    assert "--nodes 3: 16 GPUs do not divide by it" in " ".join(capsys.readouterr().err.split())
