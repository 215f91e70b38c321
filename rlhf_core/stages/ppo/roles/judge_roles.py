"""Starts the judges' engines in PPO. Each judge has a group of engines like the sampler's, but its weights
never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from rlhf_core.cluster.pending import Pending
from rlhf_core.cluster.worker import RankReady
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO
from rlhf_core.rollout.chat_models import judge_setup
from rlhf_core.rollout.engine_chat import EngineChat
from rlhf_core.rollout.sampler_role import SamplerRole

Wait = Callable[[Pending[RankReady]], None]


def start_judges(
    config: PPO,
    paths: Mapping[str, str],
    seed: int,
    groups: Mapping[str, WorkerGroup],
    trust_remote_code: bool,
    wait: Wait,
) -> dict[str, EngineChat]:
    """Starts loading the judges' models. Returns the chat with each judge, keyed by its title. A chat waits
    for its engines with `wait`, at its first request or in `EngineChat.started`. Raises ValueError for a
    model that cannot judge."""
    judges = {}
    for judge in config.own_judges:
        setup = judge_setup(
            f"the judge {judge.title}", paths[judge.group], judge.model, seed, trust_remote_code
        )
        group = groups[judge.group]
        loading = group.build(SamplerRole, **setup.options)
        judges[judge.title] = EngineChat(setup, partial(_loaded, group, loading, wait), config.timeout)
        if judge.model.engine.sleep:
            judges[judge.title].started()  # it must sleep before the models that share its GPUs load
    return judges


def _loaded(group: WorkerGroup, loading: Pending[RankReady], wait: Wait) -> WorkerGroup:
    wait(loading)
    return group
