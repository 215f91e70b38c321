"""Sends the actor's weights to the rollout engines through a route that is chosen once and used for every
sync."""

from __future__ import annotations

import secrets

from rlhf_core.cluster.pending import wait_all
from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.rollout.sampler_role import SamplerRole
from rlhf_core.rollout.weight_transfer import Rendezvous, Route, choose_route
from rlhf_core.stages.ppo.roles.actor import Actor
from rlhf_core.stages.ppo.roles.read_only import ModelRole


def open_channel(actor: WorkerGroup, sampler: WorkerGroup, timeout: float) -> Route:
    """Opens the route for weights and returns it: CUDA IPC if engines share the actor's GPUs, otherwise NCCL
    or host memory."""
    engines = [gpu for gpus in sampler.call("start", SamplerRole.gpu_uuids).wait(timeout) for gpu in gpus]
    trainer = actor.call("start", ModelRole.gpu_uuid).wait(timeout)
    route = choose_route(trainer, engines)
    key = secrets.token_bytes(16)
    sockets = actor.call("start", Actor.open_listener, key).wait(timeout) if route.kind == "gpus" else []
    by_gpu = {gpu: socket for gpu, socket in zip(trainer, sockets, strict=False) if gpu is not None}
    rendezvous = Rendezvous(actor.store_address(route.source, timeout), by_gpu, key, timeout)
    phase = "open the weight channel"
    engines_per_rank = [engines.count(gpu) for gpu in trainer]
    opening = [
        actor.call(phase, Actor.open_channel, route, rendezvous, engines_per_rank),
        sampler.call(phase, SamplerRole.open_channel, route, rendezvous),
    ]
    wait_all(opening, timeout)
    return route


def send_weights(actor: WorkerGroup, sampler: WorkerGroup, version: int, timeout: float) -> float | None:
    """Sends the actor's weights to every engine. Returns what `Actor.send_weights` returns."""
    sending = actor.call("send weights", Actor.send_weights)
    receiving = sampler.call("receive weights", SamplerRole.receive_weights, version)
    survives: float | None = wait_all([sending, receiving], timeout)[0][0]
    return survives
