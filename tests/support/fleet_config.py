"""The part of a PPO config that a fleet reads, each field set alone: a real config would refuse most
combinations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhf_core.config import EngineConfig
from rlhf_core.rewards.clients import Clients
from rlhf_core.stages.ppo.rewards.reward_sources import RewardSources


def no_sources(config: Any) -> RewardSources:
    """Returns the reward sources of a fleet that has none."""
    return RewardSources(config, {}, {}, Clients([]), lambda rows, skip: [""] * len(rows))


def fleet_config(**changed: Any) -> Any:
    fields = {
        "timeout": 1.0,
        "dtype": "float32",
        "colocate_all": False,
        "scores_actor": True,
        "weighs_tokens": False,
        "reference_in_actor": False,
        "teacher_top_k": None,
        "bootstrap_truncated": False,
        "sampler_is": "off",
        "reward": (),
        "engine": EngineConfig(),
    }
    return SimpleNamespace(**fields | changed)
