"""PPO begins: room on the cluster and a process for each rank. They import their libraries while this one imports its own and reads."""

from __future__ import annotations

import time
from typing import cast

from rlhf_core.cluster.group import Group, cpu_threads
from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.placement import connect, leave, reserve
from rlhf_core.config import PPO
from rlhf_core.forecast.zero import uses_deepspeed
from rlhf_core.garbage import uncollected
from rlhf_core.stage import Outcome, RunDir, StageRequest


def run(request: StageRequest, run: RunDir) -> Outcome:
    """The PPO stage (`train.train`)."""
    begun = time.monotonic()
    try:
        groups = seated(cast(PPO, request.config))
        with uncollected():
            from rlhf_core.ppo.train import train

        return train(request, run, groups, begun)
    except Exception:
        leave()  # so that what the roles still print does not come after the reason
        raise


def seated(config: PPO) -> dict[str, Group]:
    """The processes of each role on their seats, at their imports."""
    connect()
    room = reserve(arrange(config.placed, config.together), config.timeout)
    # Sampling has the machine to itself, unless it runs ahead; the others work two and two.
    spans, alone = {"sampler": config.vllm.tensor_parallel_size}, () if config.one_step_off_policy else ("sampler",)
    groups = {
        name: Group(name, room, cpu_threads(1 if name in alone else 2), spans.get(name, 1), growing=name != "sampler")
        for name in config.placed
    }
    for name, group in groups.items():
        if name == "sampler":
            group.prepare("rlhf_core.rollout.role:prepare", config.vllm.kv_cache_gib)
        else:
            group.prepare("rlhf_core.ppo.roles:prepare", name in ("actor", "critic") and uses_deepspeed(config))
    return groups
