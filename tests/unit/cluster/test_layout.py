"""Placement: bundles and slots, groups that share GPUs, nodes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange, by_node, shortage
from rlhf_core.config import PPO, Data, Ranks, Vllm

TWO = Ranks(num_ranks_per_node=2, cpus=2, gpus=1)


def ppo(**fields: Any) -> PPO:
    return PPO(prompts=Data(sources="prompts.jsonl"), **fields)


def on_gpus(count: int, **fields: Any) -> PPO:
    ranks = Ranks(num_ranks_per_node=count, gpus=1)
    named = dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)
    return ppo(**{**named, "vllm": Vllm(num_engines=count, gpus=1), **fields})


def test_every_process_has_a_bundle_of_its_own() -> None:
    layout = arrange({"actor": TWO, "sampler": Vllm(gpus=1, tensor_parallel_size=2)})
    assert layout.bundles == [{"CPU": 2, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 1}] * 2
    assert [slot.bundle for slot in layout.slots["sampler"]] == [2, 3] and layout.spans == {"actor": 1, "sampler": 2}


def test_on_a_machine_without_gpus_nothing_requests_one() -> None:
    layout = arrange({"actor": Ranks(cpus=0.5), "reference": Ranks(cpus=0.25)}, [["actor", "reference"]])
    assert layout.bundles == [{"CPU": 0.75}] and layout.slots["reference"][0].gpus == 0


def test_groups_together_share_gpus_rank_by_rank() -> None:
    config = on_gpus(2, colocate_all=True)
    layout = arrange(config.placed, config.together)
    assert layout.bundles == [{"CPU": 5, "GPU": 1}] * 2
    for slots in layout.slots.values():
        assert [slot.bundle for slot in slots] == [0, 1]
    assert sum(slots[0].gpus for slots in layout.slots.values()) == pytest.approx(1) and len(layout.slots) == 5


def test_a_gpu_shared_by_three_is_never_reserved_beyond_itself() -> None:
    layout = arrange({name: TWO for name in "abc"}, ["abc"])
    assert 3 * layout.slots["a"][0].gpus <= 1


def test_pairs_share_and_the_others_do_not() -> None:
    config = on_gpus(1, colocate_actor_ref=True, colocate_critic_reward=True)
    layout = arrange(config.placed, config.together)
    at = {name: slots[0].bundle for name, slots in layout.slots.items()}
    assert at["actor"] == at["reference"] and at["critic"] == at["reward:reward_model"] and len(layout.bundles) == 3
    assert len({at["actor"], at["critic"], at["sampler"]}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colocate_all": True, "vllm": Vllm(num_engines=1, gpus=1)}, r"equally many processes, there are: actor 2, .*sampler 1"),
        ({"colocate_actor_ref": True, "reference_ranks": Ranks(num_ranks_per_node=2)}, r"all need one: set gpus of reference"),
        ({"colocate_critic_reward": True, "advantage_estimator": "rloo", "n_samples_per_prompt": 2}, r"needs a critic and a reward model"),
        ({"adam_offload": True, "critic_ranks": Ranks(num_ranks_per_node=2)}, r"critic has none: set gpus"),
        ({"ref_reward_offload": True, "reference_ranks": Ranks()}, r"reference has none"),
        ({"ref_reward_shard": True, "ref_reward_offload": True}, r"two ways to free the same memory: set one of them"),
        ({"ref_reward_shard": True, "reference_ranks": Ranks(gpus=1)}, r"over its ranks, and reference has one: give it several"),
    ],
)
def test_placements_that_cannot_be_are_one_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        on_gpus(2, **fields)


def test_all_colocated_with_tensor_parallel_engines() -> None:
    config = on_gpus(4, colocate_all=True, vllm=Vllm(num_engines=2, tensor_parallel_size=2, gpus=1))
    layout = arrange(config.placed, config.together)
    assert len(layout.bundles) == 4 == len(layout.slots["sampler"])


def test_offload_names_roles_and_true_means_both() -> None:
    assert on_gpus(2, adam_offload=True).adam_offload == ("actor", "critic")
    assert on_gpus(2, adam_offload=["critic"]).adam_offload == ("critic",) and on_gpus(2, adam_offload=False).adam_offload == ()


def test_ranks_are_ordered_by_node() -> None:
    layout = arrange({"actor": Ranks(num_ranks_per_node=4, gpus=1)})
    slots = by_node(layout, {0: "a", 1: "b", 2: "a", 3: "b"})["actor"]
    assert [slot.bundle for slot in slots] == [0, 2, 1, 3]


def test_an_engine_is_never_on_two_nodes() -> None:
    layout = arrange({"sampler": Vllm(num_engines=2, tensor_parallel_size=2, gpus=1)})
    assert [slot.bundle for slot in by_node(layout, {0: "a", 1: "b", 2: "a", 3: "b"})["sampler"]] == [0, 2, 1, 3]
    with pytest.raises(ValueError, match="tensor_parallel_size=2 would be on two nodes"):
        by_node(layout, {0: "a", 1: "a", 2: "a", 3: "b"})


def test_a_shortage_is_stated_in_numbers() -> None:
    assert shortage([{"CPU": 1, "GPU": 1}] * 3, {"CPU": 8, "GPU": 2}) == "GPUs (requested 3, available 2)"
    assert shortage([{"CPU": 1}], {"CPU": 1}) == ""
