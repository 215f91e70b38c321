"""Starts the roles in their processes: chooses the ZeRO stage of actor and critic, checks GPU memory, and
loads all models concurrently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rlhf_core.cluster.pending import Pending
from rlhf_core.cluster.ray_cluster import other_nodes
from rlhf_core.cluster.worker import RankReady
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewarding.verifiers import Verifier
from rlhf_core.config.rewards import FunctionReward, HttpReward
from rlhf_core.config.training.optimised import HALF
from rlhf_core.forecast.by_phase import host_doubts
from rlhf_core.forecast.hardware import Gpu
from rlhf_core.forecast.image_data import seen_sizes
from rlhf_core.forecast.zero_stage import (
    Chosen,
    doubt,
    peak_of_ppo,
    require_start,
    size_at,
    stage_of_ppo,
    stage_of_state,
    starts_of_ppo,
)
from rlhf_core.rewards.clients import Clients, client_of
from rlhf_core.rewards.own_tokens import OwnTokens
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.fleet_metrics import survey
from rlhf_core.stages.ppo.rewards.reward_sources import RewardSources
from rlhf_core.stages.ppo.rewards.texts import decoder, lengths_of, token_texts_of
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ReferenceModel, Reward
from rlhf_core.stages.ppo.roles.role_passes import ModelSpec
from rlhf_core.stages.ppo.roles.trained import Critic
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup

if TYPE_CHECKING:
    from rlhf_core.rollout.engine_chat import EngineChat


def start_fleet(
    config: PPO,
    paths: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    groups: Mapping[str, WorkerGroup],
    engines: RolloutGroup,
    trust_remote_code: bool,
    resumed_zero_stage: int | None = None,
    own_tokens: Mapping[str, OwnTokens] = MappingProxyType({}),
    cache: Path | None = None,
    judges: Mapping[str, EngineChat] = MappingProxyType({}),
    pictures: bool = False,
) -> Fleet:
    """Starts all roles in their processes concurrently, and waits until each has loaded its model.

    `paths` maps roles to their models. `engines` belong to the groups `sampler` and `actor`.
    `resumed_zero_stage` is the ZeRO stage of a resume state, used if the recipe says `auto`. `own_tokens`
    holds re-tokenisers, by title, for reward models with another tokenizer. `cache` is a folder for judges'
    verdicts. `judges` holds the judges on engines, by title, which are already loading. `pictures` means that
    prompts have images.
    """
    # before loading anything, because it may raise
    chosen = zero_stage_of(config, paths, groups, resumed_zero_stage)
    decided = config.model_copy(update={"zero_stage": chosen.stage})
    spec = partial(spec_of, config, paths, tokenizer.pad_token_id, trust_remote_code, own_tokens, pictures)
    sampler = []
    if config.has_engines:
        sampler.append(
            start_sampler(groups["sampler"], config, paths["actor"], seed, trust_remote_code, pictures)
        )
    loading = [
        *sampler,
        *start_read_only(groups, config, paths, spec),
        *start_trained(groups, decided, spec, seed),
    ]
    wait_until_loaded(loading, paths, config.timeout)
    judging = [judge.started() for judge in judges.values()]
    titles = [source.title for source in config.reward_models if config.has_engines]
    rewards = {title: groups[f"reward:{title}"] for title in titles}
    others = other_nodes()
    clients = [
        client_of(source, others, cache, config.n_samples_per_prompt, judges.get(source.title))
        for source in config.reward
        if config.has_engines and isinstance(source, FunctionReward | HttpReward | Verifier | JudgeReward)
    ]
    fleet = Fleet(
        config=decided,
        actor=groups["actor"],
        critic=groups.get("critic"),
        reference=groups.get("reference"),
        sources=RewardSources(decided, rewards, own_tokens, Clients(clients), decoder(tokenizer)),
        engines=engines,
        lengths=lengths_of(tokenizer),
        token_texts=token_texts_of(tokenizer),
        judges=judging,
        teachers={name: groups[f"teacher:{name}"] for name in config.teachers},
    )
    if not config.has_engines:
        return fleet
    engines.open_channel()
    fleet = replace(fleet, machine=survey(decided, fleet.models, fleet.actor, engines.sampler, judging))
    if fleet.sleeps:  # the awake engines need the memory that loading left reserved
        fleet.release_memory()
    return fleet


def spec_of(
    config: PPO,
    paths: Mapping[str, str],
    pad_token_id: int,
    trust_remote_code: bool,
    own_tokens: Mapping[str, OwnTokens],
    pictures: bool,
    role: str,
) -> ModelSpec:
    """Returns the specification with which the processes of a role load its model. `pad_token_id` is the
    actor's."""
    own = own_tokens.get(role.removeprefix("reward:")) if role.startswith("reward:") else None
    return ModelSpec(
        path=paths[role],
        dtype=config.dtype_in(role),
        pad_token_id=own.pad_token_id if own is not None else pad_token_id,
        micro_batch_size=config.scoring_pass.rows,
        trust_remote_code=trust_remote_code,
        micro_tokens=config.scoring_pass.tokens,
        sharing=config.sharing_of(role),
        float8=config.float8,
        fp32_head=config.fp32_head,
        pictures=pictures,
    )


def start_sampler(
    group: WorkerGroup, config: PPO, model: str, seed: int, trust_remote_code: bool, pictures: bool
) -> Pending[RankReady]:
    """Starts loading the actor's model into the engines. `pictures` says whether prompts have images."""
    lora = config.lora if config.engine.adapters == "alone" else None
    return group.build(
        SamplerRole,
        model=model,
        seed=seed,
        max_model_len=config.longest,
        dtype=config.dtype,
        config=config.engine,
        trust_remote_code=trust_remote_code,
        can_sleep=config.engine.sleep,
        routing_replay=config.replays_routing,
        adapter_rank=lora.rank if lora is not None else 0,
        fp32_head=config.fp32_head,
        pictures=pictures,
    )


def start_read_only(
    groups: Mapping[str, WorkerGroup], config: PPO, paths: Mapping[str, str], spec: Callable[[str], ModelSpec]
) -> list[Pending[RankReady]]:
    """Starts loading reward models, teachers and the reference."""
    where = {"offload": config.ref_reward_offload, "shard": config.ref_reward_shard}
    roles = [role for role in config.groups if role.startswith("reward:")]
    loading = [groups[role].build(Reward, model=spec(role), **where) for role in roles]
    if "reference" in groups:
        # so that the KL begins at 0
        as_the_actor = config.replays_routing and paths.get("reference") == paths["actor"]
        loading.append(
            groups["reference"].build(
                ReferenceModel,
                model=spec("reference"),
                temperature=config.temperature,
                routing_replay=as_the_actor,
                **where,
            )
        )
    for role in (f"teacher:{name}" for name in config.teachers):
        build = groups[role].build
        loading.append(build(ReferenceModel, model=spec(role), temperature=config.temperature, **where))
    if config.reference_in_actor:
        print("the reference is the actor without its adapters; reference_ranks are unused", flush=True)
    return loading


def start_trained(
    groups: Mapping[str, WorkerGroup], config: PPO, spec: Callable[[str], ModelSpec], seed: int
) -> list[Pending[RankReady]]:
    """Starts loading actor and critic. `config` contains their ZeRO stage."""
    loading = [groups["actor"].build(Actor, model=spec("actor"), config=config, seed=seed)]
    if "critic" in groups:
        loading.append(groups["critic"].build(Critic, model=spec("critic"), config=config, seed=seed))
    return loading


def wait_until_loaded(
    loading: Sequence[Pending[RankReady]], paths: Mapping[str, str], timeout: float
) -> None:
    """Waits for each role's ranks, and prints how long loading took."""
    for pending in loading:
        print(f"waiting for {pending.role} to load {paths.get(pending.role, paths['actor'])}", flush=True)
        ranks = pending.wait(timeout)
        imports = max(up.imports for up in ranks)  # 0 if imports are part of the loading time
        took = (
            f"imports {imports:.0f} s, " if imports else ""
        ) + f"loading {max(up.loading for up in ranks):.0f} s"
        print(
            f"{pending.role} is up, process {', '.join(str(up.process) for up in ranks)}: {took}", flush=True
        )


def zero_stage_of(
    config: PPO, paths: Mapping[str, str], groups: Mapping[str, WorkerGroup], resumed_zero_stage: int | None
) -> Chosen:
    """Returns the ZeRO stage of actor and critic. Takes the stage from the recipe or a resume state,
    otherwise chooses one that fits the smallest of their GPUs. Prints the stage, and any doubts about memory.

    Raises MachineLacks if a GPU cannot hold everything that is loaded onto it.
    """
    sizes = None
    gpu_bytes = 0
    if config.actor_ranks.gpus:
        found = {name: size_at(paths[name]) for name in config.placed if name != "sampler"}
        known = seen_sizes(config, {name: size for name, size in found.items() if size is not None})
        sizes = known if len(known) == len(found) else None
        gpu_bytes = min(
            groups[name].gpu_bytes(config.timeout) for name in ("actor", "critic") if name in groups
        )
        for names, needed in starts_of_ppo(config, known):
            if needed > gpu_bytes:  # otherwise the memory of the other groups is not needed
                require_start(names, needed, min(groups[name].gpu_bytes(config.timeout) for name in names))
    if config.sharding is None and resumed_zero_stage is not None:
        chosen = stage_of_state(config, resumed_zero_stage)
    else:
        chosen = stage_of_ppo(config, sizes, gpu_bytes)
    print(f"actor{' and critic' if config.has_critic else ''}: {chosen}", flush=True)
    if sizes and gpu_bytes and config.dtype in HALF:
        print(doubt(peak_of_ppo(config, sizes, chosen.stage, gpu_bytes), gpu_bytes), end="", flush=True)
        free: dict[str, int] = {}
        for name in ("actor", "critic"):  # other processes may still be importing their libraries
            free |= groups[name].free_hosts(config.timeout) if name in groups else {}
        decided = config.model_copy(update={"zero_stage": chosen.stage})
        nodes = {name: group.nodes for name, group in groups.items()}
        print(host_doubts(decided, sizes, Gpu(gpu_bytes), nodes, free), end="", flush=True)
    return chosen
