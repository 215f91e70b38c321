"""Runs one engine in a Ray worker: the sampler role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_core.cluster.rank_environment import RANK_VARIABLES
from rlhf_core.config.engines import EngineConfig
from rlhf_core.rollout.engine_contract import Pictures, Request, SampledAnswer, Sampling
from rlhf_core.rollout.engine_kinds import import_engine, open_engine
from rlhf_core.rollout.weight_transfer import Rendezvous, Route
from rlhf_core.system.gc_pause import uncollected


def prepare(config: EngineConfig) -> None:
    """Imports the role's dependencies that this module does not import."""
    import_engine(config)


class SamplerRole:
    """Runs one engine (a `RolloutEngine`) of a group. Engine r of R answers prompts r, r + R, ... Each prompt
    has its own seed, so the split does not change the answers."""

    def __init__(self, model: str, *, config: EngineConfig, seed: int, **options: Any):
        """Starts the engine or one of its pipeline stages. `options`: as in `open_engine`."""
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        # The engine is alone in this process: the group's torch.distributed variables would make it wait for
        # others.
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        # Requests without a seed of their own use the engine's.
        self._engine = open_engine(model, config, seed=seed + self.rank, **options)
        self._engine.first = self.rank * config.processes
        self._seed_whole = torch.cuda.is_available() and not config.seed_answers

    def generate_share(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> list[tuple[int, list[SampledAnswer]]]:
        """Returns the answers to this engine's share of the prompts, with the prompts' indices."""
        with uncollected():
            return list(self.stream_share(prompts, seeds, sampling, pictures))

    def stream_share(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        pictures: Sequence[Pictures] = (),
    ) -> Iterator[tuple[int, list[SampledAnswer]]]:
        """Works like `generate_share`, but yields each prompt's index and answers as soon as they are
        finished."""
        mine = range(self.rank, len(prompts), self.world_size)
        own_prompts = [prompts[i] for i in mine]
        own_seeds = [seeds[i] for i in mine]
        own_pictures = [pictures[i] for i in mine] if pictures else ()
        sampling = sampling._replace(seed_whole=self._seed_whole)
        for i, group in self._engine.stream(own_prompts, own_seeds, sampling, own_pictures):
            yield mine[i], group

    def advance(
        self, requests: Sequence[Request], seconds: float, gone: Sequence[int] = ()
    ) -> list[tuple[int, SampledAnswer]]:
        own = [
            request._replace(sampling=request.sampling._replace(seed_whole=self._seed_whole))
            for request in requests
        ]
        return self._engine.advance(own, seconds, gone)

    def prompt_logprobs(
        self, documents: Sequence[Sequence[int]], pictures: Sequence[Pictures] = ()
    ) -> list[list[float]]:
        return self._engine.prompt_logprobs(documents, pictures)

    def load(self, model: str) -> None:
        self._engine.load(model)

    def gpu_uuids(self) -> list[str | None]:
        return self._engine.gpu_uuids()

    def open_channel(self, route: Route, rendezvous: Rendezvous) -> None:
        self._engine.open_channel(route, rendezvous)

    def receive_weights(self, version: int = 0) -> None:
        self._engine.receive_weights(version)

    def sampled(self) -> tuple[int, int]:
        return self._engine.sampled()

    def sleep(self, keep_weights: bool) -> None:
        self._engine.sleep(keep_weights)

    def wake(self) -> None:
        self._engine.wake()

    def stay(self) -> None:
        self._engine.stay()
