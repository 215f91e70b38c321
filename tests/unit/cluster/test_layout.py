"""Placement: bundles and slots, groups that share GPUs, nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange, by_node, shortage, too_large
from rlhf_core.config import PPO, Data, EngineConfig, Ranks

TWO = Ranks(num_ranks_per_node=2, cpus=2, gpus=1)


def ppo(**fields: Any) -> PPO:
    return PPO(prompts=Data(sources="prompts.jsonl"), **fields)


def on_gpus(count: int, **fields: Any) -> PPO:
    ranks = Ranks(num_ranks_per_node=count, gpus=1)
    named = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)
    return ppo(**{**named, "engine": EngineConfig(num_engines=count, gpus=1), **fields})


def test_every_process_and_every_engine_has_a_bundle_of_its_own() -> None:
    layout = arrange({"actor": TWO, "sampler": EngineConfig(gpus=1, num_engines=2, tensor_parallel_size=2)})
    assert layout.bundles == [{"CPU": 2, "GPU": 1}] * 2 + [{"CPU": 2, "GPU": 2}] * 2
    assert [slot.bundle for slot in layout.slots["sampler"]] == [2, 2, 3, 3] and layout.spans == {
        "actor": 1,
        "sampler": 2,
    }
    assert all(slot.gpus == 1 for slot in layout.slots["sampler"])
    assert layout.gpus() == {"actor": ["GPU 0", "GPU 1"], "sampler": ["GPU 2", "GPU 3", "GPU 4", "GPU 5"]}


def packed(bundles: Sequence[Mapping[str, float]], gpus: int, nodes: int) -> dict[int, str]:
    """As Ray packs: the largest bundles first, each on the fullest node that has room."""
    free = dict.fromkeys("abcdefgh"[:nodes], float(gpus))
    where = {}
    for i in sorted(range(len(bundles)), key=lambda i: -bundles[i]["GPU"]):
        where[i] = min(
            (node for node in free if free[node] >= bundles[i]["GPU"]), key=lambda node: free[node]
        )
        free[where[i]] -= bundles[i]["GPU"]
    return where


@pytest.mark.parametrize(
    ("actors", "engines", "over", "nodes"),
    [(6, 1, 8, 2), (6, 2, 4, 2), (3, 3, 4, 2), (10, 1, 6, 2), (7, 3, 8, 4)],
)
def test_engines_beside_any_number_of_ranks_are_on_one_node_each(
    actors: int, engines: int, over: int, nodes: int
) -> None:
    """On nodes of 8 GPUs; 6 ranks and an engine of 8 on two of them."""
    layout = arrange(
        {
            "actor": Ranks(num_ranks_per_node=actors, gpus=1),
            "sampler": EngineConfig(num_engines=engines, tensor_parallel_size=over, gpus=1),
        }
    )
    where = packed(layout.bundles, 8, nodes)
    slots = by_node(layout, where)
    assert len(slots["sampler"]) == engines * over and len(slots["actor"]) == actors
    held = Counter(where[slot.bundle] for group in slots.values() for slot in group)
    assert max(held.values()) <= 8 and sum(held.values()) == actors + engines * over
    names = layout.gpus()
    # each process has a GPU of its own
    assert len({*names["actor"], *names["sampler"]}) == actors + engines * over


def test_an_engine_in_stages_has_a_bundle_for_each_and_its_stages_may_be_on_different_nodes() -> None:
    layout = arrange(
        {"actor": TWO, "sampler": EngineConfig(gpus=1, tensor_parallel_size=2, pipeline_parallel_size=2)}
    )
    assert layout.bundles == [{"CPU": 2, "GPU": 1}] * 2 + [{"CPU": 2, "GPU": 2}] * 2
    assert [slot.bundle for slot in by_node(layout, {0: "a", 1: "a", 2: "a", 3: "b"})["sampler"]] == [
        2,
        2,
        3,
        3,
    ]
    shared = on_gpus(
        4, colocate_all=True, engine=EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, gpus=1)
    )
    placed = arrange(shared.placed, shared.together)
    assert len(by_node(placed, {0: "a", 1: "a", 2: "b", 3: "b"})["sampler"]) == 4
    with pytest.raises(ValueError, match="would be on two nodes"):
        by_node(placed, {0: "a", 1: "b", 2: "b", 3: "b"})


def test_engines_that_share_gpus_or_have_parts_of_them_have_a_bundle_for_each() -> None:
    shared = on_gpus(4, colocate_all=True, engine=EngineConfig(num_engines=2, tensor_parallel_size=2, gpus=1))
    assert [bundle["GPU"] for bundle in arrange(shared.placed, shared.together).bundles] == [1] * 4
    parts = arrange({"sampler": EngineConfig(gpus=0.5, tensor_parallel_size=2)})
    assert parts.bundles == [{"CPU": 1, "GPU": 0.5}] * 2


def test_an_engine_that_no_node_could_hold_is_told_in_numbers() -> None:
    layout = arrange({"actor": Ranks(gpus=1), "sampler": EngineConfig(gpus=1, tensor_parallel_size=8)})
    four = {"CPU": 64.0, "GPU": 4.0}
    assert too_large(layout, [four] * 4) == "a node with 8 CPUs and 8 GPUs (the largest have 64 CPUs, 4 GPUs)"
    assert too_large(layout, [four, {"CPU": 8.0, "GPU": 8.0}]) == ""


def test_on_a_machine_without_gpus_nothing_requests_one() -> None:
    layout = arrange({"actor": Ranks(cpus=0.5), "reference": Ranks(cpus=0.25)}, [["actor", "reference"]])
    assert layout.bundles == [{"CPU": 0.75}] and layout.slots["reference"][0].gpus == 0


def test_groups_together_share_gpus_rank_by_rank() -> None:
    config = on_gpus(2, colocate_all=True)
    layout = arrange(config.placed, config.together)
    assert layout.bundles == [{"CPU": 5, "GPU": 1}] * 2
    for slots in layout.slots.values():
        assert [slot.bundle for slot in slots] == [0, 1]
    assert sum(slots[0].gpus for slots in layout.slots.values()) == pytest.approx(1)
    assert len(layout.slots) == 5


def test_a_gpu_shared_by_three_is_never_reserved_beyond_itself() -> None:
    layout = arrange({name: TWO for name in "abc"}, ["abc"])
    assert 3 * layout.slots["a"][0].gpus <= 1


def test_pairs_share_and_the_others_do_not() -> None:
    config = on_gpus(1, colocate_actor_ref=True, colocate_critic_reward=True)
    layout = arrange(config.placed, config.together)
    at = {name: slots[0].bundle for name, slots in layout.slots.items()}
    assert at["actor"] == at["reference"]
    assert at["critic"] == at["reward:reward_model"]
    assert len(layout.bundles) == 3
    assert len({at["actor"], at["critic"], at["sampler"]}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"colocate_all": True, "engine": EngineConfig(num_engines=1, gpus=1)},
            r"the same number of processes, but have: actor 2, .*sampler 1",
        ),
        (
            {"colocate_actor_ref": True, "reference_ranks": Ranks(num_ranks_per_node=2)},
            r"all use GPUs: set gpus of reference",
        ),
        (
            {"colocate_critic_reward": True, "advantage_estimator": "rloo", "n_samples_per_prompt": 2},
            r"needs a critic and a reward model",
        ),
        (
            {"adam_offload": True, "critic_ranks": Ranks(num_ranks_per_node=2)},
            r"these groups have no GPU: .*critic: set gpus",
        ),
        (
            {"ref_reward_offload": True, "reference_ranks": Ranks()},
            r"these groups have no GPU: reference: set gpus",
        ),
        (
            {"ref_reward_shard": True, "ref_reward_offload": True},
            r"two ways to free the same memory: set one of them",
        ),
        (
            {"ref_reward_shard": True, "reference_ranks": Ranks(gpus=1)},
            r"over its ranks, but these groups have one rank: reference: leave it out",
        ),
    ],
)
def test_placements_that_cannot_be_are_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        on_gpus(2, **fields)


def test_all_colocated_with_tensor_parallel_engines() -> None:
    config = on_gpus(4, colocate_all=True, engine=EngineConfig(num_engines=2, tensor_parallel_size=2, gpus=1))
    layout = arrange(config.placed, config.together)
    assert len(layout.bundles) == 4 == len(layout.slots["sampler"])


def test_offload_names_roles_and_true_means_both() -> None:
    assert on_gpus(2, adam_offload=True).adam_offload == ("actor", "critic")
    assert on_gpus(2, adam_offload=["critic"]).adam_offload == ("critic",)
    assert on_gpus(2, adam_offload=False).adam_offload == ()


def test_ranks_are_ordered_by_node() -> None:
    layout = arrange({"actor": Ranks(num_ranks_per_node=4, gpus=1)})
    slots = by_node(layout, {0: "a", 1: "b", 2: "a", 3: "b"})["actor"]
    assert [slot.bundle for slot in slots] == [0, 2, 1, 3]


def test_an_engine_is_never_on_two_nodes() -> None:
    # which has a bundle for each GPU
    layout = arrange({"sampler": EngineConfig(num_engines=2, tensor_parallel_size=2, gpus=0.5)})
    assert [slot.bundle for slot in by_node(layout, {0: "a", 1: "b", 2: "a", 3: "b"})["sampler"]] == [
        0,
        2,
        1,
        3,
    ]
    with pytest.raises(ValueError, match="tensor_parallel_size=2 would be on two nodes"):
        by_node(layout, {0: "a", 1: "a", 2: "a", 3: "b"})


def test_a_shortage_is_stated_in_numbers() -> None:
    assert shortage([{"CPU": 1, "GPU": 1}] * 3, {"CPU": 8, "GPU": 2}) == "GPUs (requested 3, available 2)"
    assert shortage([{"CPU": 1}], {"CPU": 1}) == ""
