"""Placements of a PPO stage on a number of cards, each with its memory and seconds, and the one to choose. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.forecast.memory import ROOM, cards, engine_needs, roles
from rlhf_core.forecast.seconds import Card, phases
from rlhf_core.forecast.sizes import Size
from rlhf_core.forecast.zero import stage_of_ppo
from rlhf_core.reward_sources import ModelReward

RANKS = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")


class Placement(NamedTuple):
    """One way to place the stage: the fields that make it, bytes of its fullest card, all cards with their groups, seconds by phase, and
    the bytes that an engine's share of a card lacks for its weights (0 or less: none)."""

    name: str
    fields: dict[str, Any]
    peak: float
    cards: dict[str, tuple[list[str], float]]
    seconds: dict[str, float]
    lacking: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def fits(self, card: Card) -> bool:
        return self.peak <= ROOM * card.memory and self.lacking <= 0


def forecast(name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], card: Card) -> Placement:
    config = config.model_copy(update={"zero_stage": stage_of_ppo(config, sizes, card.memory).stage})
    layout = arrange(config.placed, config.together)
    found = cards(config, layout, roles(config, sizes, card.memory))
    lacking = engine_needs(sizes["actor"], config.vllm.tensor_parallel_size) - config.vllm.gpu_memory_utilization * card.memory
    return Placement(name, fields, max(held for _, held in found.values()), found, phases(config, layout, sizes, card), lacking)


def placements(config: PPO, count: int, sizes: Mapping[str, Size], card: Card) -> list[Placement]:
    """The recipe's own placement first, then what could be had on `count` cards."""
    taken = f", zero_stage {stage_of_ppo(config, sizes, card.memory).stage}" if config.zero_stage == "auto" else ""
    found = [forecast(f"as in the recipe{taken}", config, {}, sizes, card)] if config.actor_ranks.gpus else []
    for name, fields in _options(config, count, engine_needs(sizes["actor"], 1) / card.memory).items():
        try:
            changed = PPO.model_validate(config.model_dump() | fields)
        except ValidationError:  # the batch sizes do not fit so many ranks, or the engines are to work beside the models
            continue
        if sum(bundle.get("GPU", 0.0) for bundle in arrange(changed.placed, changed.together).bundles) > count:
            continue
        found.append(forecast(name, changed, fields, sizes, card))
    return found


def choose(found: list[Placement], card: Card) -> Placement | None:
    """The fastest that fits; among equals (within 5 %) the one that leaves most memory. None when none fits."""
    fitting = [placement for placement in found if placement.fits(card)]
    fastest = min((placement.total for placement in fitting), default=0.0)
    return min((p for p in fitting if p.total <= 1.05 * fastest), key=lambda p: p.peak, default=None)


def _options(config: PPO, count: int, needed: float) -> dict[str, dict[str, Any]]:
    """`needed`: the share of a card without which an engine on one card does not start."""

    def ranks(number: int) -> dict[str, Any]:
        return {"num_nodes": 1, "num_ranks_per_node": number, "cpus": config.actor_ranks.cpus, "gpus": 1.0}

    vllm = config.vllm.model_dump()
    switches = ("colocate_all", "colocate_actor_ref", "colocate_critic_reward", "ref_reward_offload", "adam_offload")
    rewards = [source.model_copy(update={"ranks": None}) if isinstance(source, ModelReward) else source for source in config.reward]
    apart: dict[str, Any] = dict.fromkeys(switches, False)
    if any(source.ranks for source in config.reward_models):
        apart["reward"] = [source.model_dump() for source in rewards]

    def engines(cards: int, share: float) -> dict[str, Any]:
        """As many as fit `cards`, each over as many as the recipe says where they divide."""
        over = config.vllm.tensor_parallel_size if cards % config.vllm.tensor_parallel_size == 0 else 1
        share = min(0.9, max(share, math.ceil(20 * 1.2 * needed / over) / 20))
        return vllm | {"num_engines": cards // over, "tensor_parallel_size": over, "gpus": 1.0, "gpu_memory_utilization": share}

    roles = [field for field in RANKS if config.has_critic or field != "critic_ranks"]
    together = {**apart, **dict.fromkeys(roles, ranks(count)), "colocate_all": True, "vllm": engines(count, 0.3) | {"sleep": True}}
    offloaded = ["actor", "critic"] if config.has_critic else ["actor"]
    options = {
        "all together": {**together, "zero_stage": 2 if count > 1 else 0},
        "all together, ZeRO-3, reference and reward offloaded": {**together, "zero_stage": 3, "ref_reward_offload": True},
        "all together, Adam offloaded too": {**together, "zero_stage": 3, "ref_reward_offload": True, "adam_offload": offloaded},
    }
    judges = ["critic"] * config.has_critic + ["reward"] * bool(config.reward_models)
    actor, each = count // 2, max(1, count // 4)
    judging = each * (1 if config.has_critic else len(config.reward_models))  # without a critic reward models share no cards
    if (engine := count - actor - judging) >= 1 and count >= 3:
        split = {
            **apart,
            **dict.fromkeys(("actor_ranks", "reference_ranks"), ranks(actor)),
            **dict.fromkeys([field for field in roles if field in ("critic_ranks", "reward_ranks")], ranks(each)),
            "colocate_actor_ref": True,
            "colocate_critic_reward": config.has_critic and bool(config.reward_models),
            "zero_stage": 3,
            "vllm": engines(engine, 0.9) | {"sleep": False},
        }
        others = f"{' and '.join(judges)} on {judging}, " if judges else ""
        options[f"actor and reference on {actor}, {others}vLLM on {engine}"] = split
        if config.has_critic:
            with_offload = {**split, "adam_offload": ["critic"]}
            options[f"the same, the critic's Adam offloaded ({actor} + {each} + {engine})"] = with_offload
    return options
