"""Before actor and critic are loaded: their ZeRO stage, and whether their GPUs will hold what is placed on them."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_core.cluster.worker_group import Group
from rlhf_core.config import PPO
from rlhf_core.forecast.zero_stage import Chosen, doubt, peak_of_ppo, require_start, size_at, stage_of_ppo, starts


def layout_of(config: PPO) -> dict[str, int | str]:
    """What a resume state must have in common with the ranks that read it: of the roles that are trained."""
    trained = {name: config.groups[name].world_size for name in ("actor", "critic") if name in config.groups}
    return {**{f"{name}_ranks": size for name, size in trained.items()}, "zero_stage": config.zero_stage}


def zero_stage_of(config: PPO, paths: Mapping[str, str], groups: Mapping[str, Group], kept_stage: int | None) -> Chosen:
    """The ZeRO stage of actor and critic; where the recipe leaves it open, by the smallest of their GPUs. Says so, and what it doubts.

    Raises MachineLacks when one of their GPUs cannot hold what is loaded onto it.
    """
    sizes, card_bytes = None, 0
    if config.actor_ranks.gpus:
        found = {name: size_at(paths[name]) for name in config.groups}
        known = {name: size for name, size in found.items() if size is not None}
        sizes = known if len(known) == len(found) else None
        card_bytes = min(groups[name].card_bytes(config.timeout) for name in ("actor", "critic") if name in groups)
        require_start(starts(config, {role: size for role, size in known.items() if role in ("actor", "critic")}), card_bytes)
    if config.zero_stage == "auto" and kept_stage is not None:
        ignored = ", so adam_offload counts from the next start without one" if kept_stage == 0 and config.adam_offload else ""
        chosen = Chosen(kept_stage, f"as its resume state{ignored}")
    else:
        chosen = stage_of_ppo(config, sizes, card_bytes)
    print(f"actor{' and critic' if config.has_critic else ''}: {chosen}", flush=True)
    if sizes and card_bytes and config.dtype == "bfloat16":
        print(doubt(peak_of_ppo(config, sizes, chosen.stage, card_bytes), card_bytes), end="", flush=True)
    return chosen
