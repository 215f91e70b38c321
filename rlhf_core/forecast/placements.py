"""Finds placements of a PPO stage on a number of GPUs, each with its memory and seconds, and chooses one.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO
from rlhf_core.config.rewards import ModelReward
from rlhf_core.forecast.by_phase import PhaseBytes, by_phase
from rlhf_core.forecast.fitting_passes import alternatives, fields_of
from rlhf_core.forecast.hardware import Gpu, nodes_of
from rlhf_core.forecast.memory import USABLE, engine_needs, gpu_peaks, roles
from rlhf_core.forecast.seconds import Range, phases, phases_as_range, shares_of_engine
from rlhf_core.forecast.zero_stage import stage_of_ppo
from rlhf_core.hub.model_config import Size

MOST_OF_ENGINE = 0.45  # of a GPU shared with models
RANKS = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")


class Placement(NamedTuple):
    """One way to place the stage: the fields that produce it, bytes of its fullest GPU, all GPUs with their
    groups, seconds by phase, the bytes that an engine's share of a GPU lacks for its weights (0 or less:
    none), and the number of GPUs that it needs beyond the available ones."""

    name: str
    fields: dict[str, Any]
    peak: float
    gpus: dict[str, tuple[list[str], float]]
    seconds: dict[str, float]
    lacking: float
    beyond: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def fits(self, gpu: Gpu) -> bool:
        return self.peak <= USABLE * gpu.memory and self.lacking <= 0 and self.beyond <= 0


def forecast(
    name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], gpu: Gpu
) -> Placement:
    config = config.model_copy(update={"zero_stage": stage_of_ppo(config, sizes, gpu.memory).stage})
    layout = arrange(config.placed, config.together)
    found = gpu_peaks(config, layout, roles(config, sizes, gpu.memory))
    engine = config.engine
    lacking = engine_needs(sizes["actor"], engine.processes) - engine.gpu_memory_utilization * gpu.memory
    return Placement(
        name,
        fields,
        max(held for _, held in found.values()),
        found,
        phases(config, layout, sizes, gpu),
        lacking,
    )


class Details(NamedTuple):
    """Details of one placement: seconds by phase as a range, and memory by phase."""

    seconds: Range
    memory: dict[str, PhaseBytes]


def with_fields(config: PPO, placement: Placement) -> PPO:
    """Returns the recipe's stage with the fields of one of `placements`."""
    return PPO.model_validate(config.model_dump() | placement.fields)


def details(config: PPO, placement: Placement, sizes: Mapping[str, Size], gpu: Gpu) -> Details:
    """Simulates one of `placements` phase by phase."""
    changed = with_fields(config, placement)
    changed = changed.model_copy(update={"zero_stage": stage_of_ppo(changed, sizes, gpu.memory).stage})
    layout = arrange(changed.placed, changed.together)
    return Details(phases_as_range(changed, layout, sizes, gpu), by_phase(changed, layout, sizes, gpu))


def placements(config: PPO, count: int, sizes: Mapping[str, Size], gpu: Gpu) -> list[Placement]:
    """Returns the recipe's own placement first, with other passes if those fit or are faster, then the
    alternatives on `count` GPUs."""
    found = []
    if config.actor_ranks.gpus:
        taken = (
            f", zero_stage {stage_of_ppo(config, sizes, gpu.memory).stage}"
            if config.zero_stage == "auto"
            else ""
        )
        beyond = max(0.0, _gpu_count(config) - count)
        found.append(forecast(f"as in the recipe{taken}", config, {}, sizes, gpu)._replace(beyond=beyond))
        other = _best(_with_other_passes("the recipe's placement", config, {}, sizes, gpu), gpu)
        found += [other._replace(beyond=beyond)] if other.fields else []
    for name, fields in options_on(config, count, sizes["actor"], gpu).items():
        try:
            changed = PPO.model_validate(config.model_dump() | fields)
        except (
            ValidationError
        ):  # batch sizes that do not fit so many ranks, or engines that must work beside the models
            continue
        if _gpu_count(changed) > count:
            continue
        if changed.param_offload and any(placement.fits(gpu) for placement in found):
            continue  # its seconds are not measured, so only if nothing else fits
        tried = []
        for share in shares_of_engine(changed, sizes["actor"], gpu) if changed.colocate_all else [0.9]:
            changed = changed.model_copy(
                update={"engine": changed.engine.model_copy(update={"gpu_memory_utilization": share})}
            )
            tried += _with_other_passes(
                name, changed, fields | {"engine": changed.engine.model_dump()}, sizes, gpu
            )
        found.append(_best(tried, gpu))
    return found


def on_fewest(config: PPO, count: int, sizes: Mapping[str, Size], gpu: Gpu) -> tuple[int, list[Placement]]:
    """Returns a number of GPUs and the placements on them: `count`, or a half, a quarter, ... of it if the
    best placement on these is as fast (within 5 %)."""
    fewest = count
    found = placements(config, count, sizes, gpu)
    fastest = choose(found, gpu)
    while fastest is not None and (count := count // 2):
        others = placements(config, count, sizes, gpu)
        best = choose(others, gpu)
        if best is not None and best.total <= 1.05 * fastest.total:
            fewest = count
            found = others
    return fewest, found


def _gpu_count(config: PPO) -> float:
    return sum(bundle.get("GPU", 0.0) for bundle in arrange(config.placed, config.together).bundles)


def _with_other_passes(
    name: str, config: PPO, fields: dict[str, Any], sizes: Mapping[str, Size], gpu: Gpu
) -> list[Placement]:
    """Returns a placement with the recipe's passes, and with each of the alternatives."""
    found = [forecast(name, config, fields, sizes, gpu)]
    for other in alternatives(config)[1:]:
        passes = fields_of(other, config)
        found.append(
            forecast(f"{name}; {other}", config.model_copy(update=passes), fields | passes, sizes, gpu)
        )
    return found


def _best(found: list[Placement], gpu: Gpu) -> Placement:
    """Returns the fastest placement that fits, the first among equals (within 1 %); if none fits, the one
    that needs the least memory."""
    fastest = min((placement.total for placement in found if placement.fits(gpu)), default=0.0)
    least = min(found, key=lambda placement: placement.peak)
    return next(
        (placement for placement in found if placement.fits(gpu) and placement.total <= 1.01 * fastest), least
    )


def choose(found: list[Placement], gpu: Gpu) -> Placement | None:
    """Returns the fastest placement that fits. Among equals (within 5 %) this is the recipe's own, or the
    one that leaves the most memory, if that makes a difference (5 % of a GPU). Returns None when none fits.
    """
    fitting = [placement for placement in found if placement.fits(gpu)]
    fastest = min((placement.total for placement in fitting), default=0.0)
    equals = [placement for placement in fitting if placement.total <= 1.05 * fastest]
    return min(
        equals,
        key=lambda placement: round(20 * placement.peak / gpu.memory) if placement.fields else -1,
        default=None,
    )


def options_on(config: PPO, count: int, size: Size, gpu: Gpu) -> dict[str, dict[str, Any]]:
    """Returns the fields for each placement, by its name."""

    def ranks(number: int) -> dict[str, Any]:
        nodes = number // gpu.per_node if number > gpu.per_node and number % gpu.per_node == 0 else 1
        return {
            "num_nodes": nodes,
            "num_ranks_per_node": number // nodes,
            "cpus": config.actor_ranks.cpus,
            "gpus": 1.0,
        }

    engine = config.engine.model_dump()
    colocations = ("colocate_all", "colocate_actor_ref", "colocate_critic_reward")
    switches = (
        *colocations,
        "ref_reward_offload",
        "ref_reward_shard",
        "adam_offload",
        "param_offload",
        "zero_hpz",
    )
    rewards = [
        source.model_copy(update={"ranks": None}) if isinstance(source, ModelReward) else source
        for source in config.reward
    ]
    apart: dict[str, Any] = dict.fromkeys(switches, False)
    if any(source.ranks for source in config.reward_models):
        apart["reward"] = [source.model_dump() for source in rewards]

    def engines(gpus: int, alone: bool) -> dict[str, Any]:
        """Returns as many engines as fit on `gpus`. Each uses the recipe's number of GPUs if it divides
        them, or more GPUs of a node if its weights would take more than `MOST_OF_ENGINE` of each, or beyond
        a node, pipeline stages. Engines are alone on their GPUs, or beside models."""
        over = config.engine.tensor_parallel_size if gpus % config.engine.tensor_parallel_size == 0 else 1
        most = (0.9 if alone else MOST_OF_ENGINE) * gpu.memory
        stages = 1
        while engine_needs(size, over * stages) > most and gpus % (2 * over * stages) == 0:
            over, stages = (2 * over, 1) if 2 * over <= gpu.per_node else (over, 2 * stages)
        sizes = {
            "num_engines": gpus // over // stages,
            "tensor_parallel_size": over,
            "pipeline_parallel_size": stages,
        }
        return engine | sizes | {"gpus": 1.0, "sleep": not alone}

    roles = [field for field in RANKS if config.has_critic or field != "critic_ranks"]
    together = {
        **apart,
        **dict.fromkeys(roles, ranks(count)),
        "colocate_all": True,
        "engine": engines(count, alone=False),
    }
    offloaded = ["actor", "critic"] if config.has_critic else ["actor"]
    # 4-bit weights are not sharded
    most = 2 if config.lora is not None and config.lora.quantize != "none" else 3
    shards = f", ZeRO-{most}" if count > 1 else ""  # one GPU has nothing to shard
    zero_stage = most if shards else 0
    least = 1 if config.deepspeed else 0  # DeepSpeed's options do not apply to plain torch
    on_host = {"ref_reward_offload": True, "adam_offload": offloaded, "zero_stage": most if shards else 2}
    in_shares = {"ref_reward_shard": True, "zero_stage": zero_stage}
    options = {
        "all together": together | {"zero_stage": 2 if shards else 0},
        f"all together{shards}, reference and reward offloaded": (
            together | {"zero_stage": zero_stage, "ref_reward_offload": True}
        ),
        "all together, Adam offloaded too": together | on_host,
    }
    if shards and config.read_only:
        options |= {
            f"all together{shards}, reference and reward sharded": together | in_shares,
            "all together, reference and reward sharded, Adam offloaded": (
                together | in_shares | {"adam_offload": offloaded}
            ),
        }
    if shards and most == 3 and nodes_of(count, gpu) > 1:
        options["all together, all offloaded, a copy of the weights on each node (zero_hpz)"] = (
            together | on_host | {"zero_hpz": True}
        )
    judges = ["critic"] * config.has_critic + ["reward"] * bool(config.reward_models)
    actor = count // 2
    each = max(1, count // 4)
    # without a critic, reward models do not share GPUs
    judging = each * (1 if config.has_critic else len(config.reward_models))
    left = count - actor - judging
    if left >= 1 and count >= 3:
        split = {
            **apart,
            **dict.fromkeys(("actor_ranks", "reference_ranks"), ranks(actor)),
            **dict.fromkeys(
                [field for field in roles if field in ("critic_ranks", "reward_ranks")], ranks(each)
            ),
            "colocate_actor_ref": True,
            "colocate_critic_reward": config.has_critic and bool(config.reward_models),
            "zero_stage": most if actor > 1 else 0,
            "engine": engines(left, alone=True),
        }
        others = f"{' and '.join(judges)} on {judging}, " if judges else ""
        options[f"actor and reference on {actor}, {others}vLLM on {left}"] = split
        if min(actor, each) > 1 and config.read_only:
            options[f"the same, reference and reward sharded ({actor} + {each} + {left})"] = split | {
                "ref_reward_shard": True
            }
        if config.has_critic:
            offload = {"adam_offload": ["critic"], "zero_stage": most if actor > 1 else 2}
            options[f"the same, the critic's Adam offloaded ({actor} + {each} + {left})"] = split | offload
    if most == 3:
        frozen = in_shares if shards and config.read_only else {"ref_reward_offload": True}
        on_host = frozen | {"adam_offload": offloaded, "param_offload": offloaded, "zero_stage": 3}
        options["all together, weights and Adam offloaded"] = together | on_host
    return {
        name: fields | {"zero_stage": max(least, fields["zero_stage"])} for name, fields in options.items()
    }
