"""Measures the running roles of PPO: sizes and GPUs at the start, then memory and working time in each
iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_core.cluster.pending import wait_all
from rlhf_core.cluster.work_log import GroupWork
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.config import PPO
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.stages.ppo.measured.phase_clock import HOST
from rlhf_core.stages.ppo.measured.roofline import RooflineInputs
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ModelRole


def survey(
    config: PPO,
    models: Sequence[WorkerGroup],
    actor: WorkerGroup,
    sampler: WorkerGroup,
    judges: Sequence[WorkerGroup] = (),
) -> RooflineInputs:
    """Returns the sizes and GPUs of all roles, and measures the actor's GPU. Call it while nothing else is
    running."""
    shapes = {group.name: group.call("start", ModelRole.shape).wait(config.timeout)[0] for group in models}
    gpus = {group.name: group.call("start", ModelRole.gpu_uuid).wait(config.timeout) for group in models}
    engines = sampler.call("start", SamplerRole.gpu_uuids).wait(config.timeout)
    gpus["sampler"] = [gpu for engine in engines for gpu in engine]
    for group in judges:
        by_engine = group.call("start", SamplerRole.gpu_uuids).wait(config.timeout)
        gpus[group.name] = [gpu for engine in by_engine for gpu in engine]
    ceilings = actor.call("start", Actor.ceilings).wait(config.timeout)[0]
    assert ceilings is not None, "the first rank measures"
    named = {role: [gpu or HOST for gpu in held] for role, held in gpus.items()}
    span = len(engines[0]) // config.engine.pipeline_parallel_size
    return RooflineInputs(shapes | {"sampler": shapes["actor"]}, named, span, ceilings)


def memory_metrics(models: Sequence[WorkerGroup], timeout: float) -> dict[str, float]:
    """Returns, for each model, the peak GiB allocated, the peak GiB reserved, and the GiB still reserved."""
    metrics: dict[str, float] = {}
    memory = wait_all([group.call("look", ModelRole.memory) for group in models], timeout)
    for group, by_rank in zip(models, memory, strict=True):
        gib = [max(ranks) / 2**30 for ranks in zip(*by_rank, strict=True)]
        names = (f"memory/{group.name}{what}" for what in ("", "/held", "/kept"))
        metrics |= dict(zip(names, gib, strict=True)) if any(gib) else {}
    return metrics


def work_metrics(work: Mapping[str, GroupWork], seconds: float) -> dict[str, float]:
    """Returns the seconds that each role worked in each phase, and the fraction of `seconds` that it
    waited."""
    metrics: dict[str, float] = {}
    for role, done in work.items():
        spent = done.seconds()
        metrics |= {f"work/{role}/{phase.replace(' ', '_')}": taken for phase, taken in spent.items()}
        metrics[f"wait/{role}"] = max(0.0, 1 - sum(spent.values()) / seconds)
    return metrics
