"""Placements of a PPO stage on a number of cards, each with its memory and seconds, and the one to choose. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.memory import ROOM, cards, roles
from rlhf_core.forecast.seconds import Card, phases
from rlhf_core.forecast.sizes import Size
from rlhf_core.forecast.zero import stage_of_ppo

RANKS = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")


class Placement(NamedTuple):
    """One way to place the stage: the fields that make it, bytes of its fullest card, all cards with their groups, seconds by phase."""

    name: str
    fields: dict[str, Any]
    peak: float
    cards: dict[str, tuple[list[str], float]]
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def fits(self, card: Card) -> bool:
        return self.peak <= ROOM * card.memory


def forecast(name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], card: Card) -> Placement:
    config = config.model_copy(update={"zero_stage": stage_of_ppo(config, sizes, card.memory).stage})
    layout = arrange(config.placed, config.together)
    found = cards(config, layout, roles(config, sizes, card.memory))
    return Placement(name, fields, max(held for _, held in found.values()), found, phases(config, layout, sizes, card))


def placements(config: PPO, count: int, sizes: Mapping[str, Size], card: Card) -> list[Placement]:
    """The recipe's own placement first, then what could be had on `count` cards."""
    taken = f", zero_stage {stage_of_ppo(config, sizes, card.memory).stage}" if config.zero_stage == "auto" else ""
    found = [forecast(f"as in the recipe{taken}", config, {}, sizes, card)] if config.actor_ranks.gpus else []
    for name, fields in _options(config, count).items():
        try:
            changed = PPO.model_validate(config.model_dump() | fields)
        except ValidationError:  # the batch sizes do not fit so many ranks, or the engines are to work beside the models
            continue
        found.append(forecast(name, changed, fields, sizes, card))
    return found


def choose(found: list[Placement], card: Card) -> Placement | None:
    """The fastest that fits; among equals (within 5 %) the one that leaves most memory. None when none fits."""
    fitting = [placement for placement in found if placement.fits(card)]
    fastest = min((placement.total for placement in fitting), default=0.0)
    return min((p for p in fitting if p.total <= 1.05 * fastest), key=lambda p: p.peak, default=None)


def _options(config: PPO, count: int) -> dict[str, dict[str, Any]]:
    def ranks(number: int) -> dict[str, Any]:
        return {"num_nodes": 1, "num_ranks_per_node": number, "cpus": config.actor_ranks.cpus, "gpus": 1.0}

    vllm = config.vllm.model_dump()
    switches = ("colocate_all", "colocate_actor_ref", "colocate_critic_reward", "ref_reward_offload", "adam_offload")
    apart: dict[str, Any] = dict.fromkeys(switches, False)
    engines = {"num_engines": count, "tensor_parallel_size": 1, "gpus": 1.0, "gpu_memory_utilization": 0.3, "sleep": True}
    together = {**apart, **dict.fromkeys(RANKS, ranks(count)), "colocate_all": True, "vllm": vllm | engines}
    options = {
        "all together": {**together, "zero_stage": 2},
        "all together, ZeRO-3, reference and reward offloaded": {**together, "zero_stage": 3, "ref_reward_offload": True},
        "all together, Adam offloaded too": {**together, "zero_stage": 3, "ref_reward_offload": True, "adam_offload": ["actor", "critic"]},
    }
    if count >= 3:
        actor, critic = count // 2, max(1, count // 4)
        engine = vllm | engines | {"num_engines": count - actor - critic, "gpu_memory_utilization": 0.9, "sleep": False}
        shared = {
            "actor_ranks": ranks(actor),
            "reference_ranks": ranks(actor),
            "critic_ranks": ranks(critic),
            "reward_ranks": ranks(critic),
        }
        split = {
            **apart,
            **shared,
            "colocate_actor_ref": True,
            "colocate_critic_reward": config.has_critic,
            "zero_stage": 3,
            "vllm": engine,
        }
        options[f"actor and reference on {actor}, critic and reward on {critic}, vLLM on {count - actor - critic}"] = split
        options[f"the same, the critic's Adam offloaded ({actor} + {critic} + {count - actor - critic})"] = {
            **split,
            "adam_offload": ["critic"],
        }
    return options
