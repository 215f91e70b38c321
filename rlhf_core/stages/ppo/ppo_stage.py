"""Starts PPO: reserves the cluster and starts a process for each rank. The ranks import their libraries while
this process imports its own."""

from __future__ import annotations

import time
from typing import cast

from rlhf_core.cluster.layout import arrange
from rlhf_core.cluster.ray_cluster import connect, leave, reserve
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO, EngineConfig
from rlhf_core.forecast.zero_stage import uses_deepspeed
from rlhf_core.hub.positions import require_positions, stored_config
from rlhf_core.runs.awaited_servers import require_servers
from rlhf_core.runs.run_dir import Outcome, RunDir, StageRequest
from rlhf_core.system.gc_pause import uncollected


def run(request: StageRequest, run: RunDir) -> Outcome:
    """Runs the PPO stage; see `train.train`. Raises ValueError for lengths beyond the actor's positions.
    Raises Unreachable, before it starts a process, if a judge or a reward server does not answer."""
    begun = time.monotonic()
    config = cast(PPO, request.config)
    actor = request.inputs[config.actor]
    require_positions(actor, stored_config(actor), config.longest)
    if config.has_engines:
        require_servers(config.servers)
    try:
        groups = start_processes(config)
        with uncollected():
            from rlhf_core.stages.ppo.train import train

        return train(request, run, groups, begun)
    except Exception:
        leave()  # keeps late output of the roles from following the error
        raise


def start_processes(config: PPO) -> dict[str, WorkerGroup]:
    """Starts the processes of each role on their reserved slots; the processes import their libraries."""
    connect()
    reservation = reserve(arrange(config.placed, config.together), config.timeout)
    processes = sum(len(slots) for slots in reservation.slots.values())
    print(
        f"starting {processes} processes, which import their libraries and then load their models", flush=True
    )
    # Sampling runs alone, unless it runs ahead; the other roles run in pairs.
    alone = () if config.max_staleness else ("sampler",)
    engines = {name: wanted for name, wanted in config.placed.items() if isinstance(wanted, EngineConfig)}
    groups = {
        name: WorkerGroup(
            name,
            reservation,
            1 if name in alone else 2,
            engines[name].processes if name in engines else 1,
            expandable_segments=name not in engines,
            together=name in ("actor", "critic"),
            pipeline_stages=engines[name].pipeline_parallel_size if name in engines else 1,
        )
        for name in config.placed
    }
    for name, group in groups.items():
        if name in engines:
            group.prepare("rlhf_core.rollout.sampler_role:prepare", engines[name])
        else:
            group.prepare(
                "rlhf_core.stages.ppo.roles.actor:prepare",
                name in ("actor", "critic") and uses_deepspeed(config),
            )
    return groups
