"""Before actor and critic are loaded: their ZeRO stage, and whether their cards will hold what is placed on them."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.cluster.group import Group
from rlhf_core.config import PPO
from rlhf_core.forecast.zero import Chosen, doubt, peak_of_ppo, size_at, stage_of_ppo


def zero_stage_of(config: PPO, paths: Mapping[str, str], groups: Mapping[str, Group], kept_stage: int | None) -> Chosen:
    """The ZeRO stage of actor and critic; where the recipe leaves it open, by the smallest of their GPUs. Says so, and what it doubts."""
    sizes, card_bytes = None, 0
    if config.actor_ranks.gpus:
        found = {name: size_at(paths[name]) for name in config.groups}
        known = {name: size for name, size in found.items() if size is not None}
        sizes = known if len(known) == len(found) else None
        card_bytes = min(groups[name].card_bytes(config.timeout) for name in ("actor", "critic") if name in groups)
    if config.zero_stage == "auto" and kept_stage is not None:
        chosen = Chosen(kept_stage, "as its resume state")
    else:
        chosen = stage_of_ppo(config, sizes, card_bytes)
    print(f"actor{' and critic' if config.has_critic else ''}: {chosen}", flush=True)
    if sizes and card_bytes and config.dtype == "bfloat16":
        print(doubt(peak_of_ppo(config, sizes, chosen.stage, card_bytes), card_bytes), end="", flush=True)
    return chosen
