"""Runs one vLLM engine as the object of a Ray worker: the sampler role."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_core.cluster.rank_environment import RANK_VARIABLES
from rlhf_core.config import Vllm
from rlhf_core.rollout.engine import Answer, Request, Sampler, Sampling, library
from rlhf_core.rollout.pipeline import PipelineStage
from rlhf_core.system.gc_pause import uncollected


def prepare(kv_cache_gib: float) -> None:
    """Imports the role's dependencies that this module does not import."""
    library(kv_cache_gib)


class SamplerRole(Sampler):
    """Runs one engine of a group. Engine r of R answers prompts r, r + R, ... Each prompt has its own seed,
    so the split does not change the answers."""

    def __init__(self, model: str, *, vllm: Vllm, stage: tuple[Any, ...] = (), **options: Any):
        """Starts the engine or one of its stages. `options`: passed to `Sampler`."""
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        # The engine is alone in this process: the group's torch.distributed variables would make it wait for
        # others.
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        # Requests without a seed draw from the engine's.
        super().__init__(
            model, vllm=vllm, stage=PipelineStage(*stage), **options | {"seed": options["seed"] + self.rank}
        )
        self.first = self.rank * vllm.processes
        self._seed_whole = torch.cuda.is_available() and not vllm.seed_answers

    def generate_share(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[tuple[int, list[Answer]]]:
        """Returns the answers to this engine's share of the prompts, with the prompts' indices."""
        with uncollected():
            return list(self.stream_share(prompts, seeds, sampling))

    def advance(
        self, requests: Sequence[Request], seconds: float, gone: Sequence[int] = ()
    ) -> list[tuple[int, Answer]]:
        own = [
            request._replace(sampling=request.sampling._replace(seed_whole=self._seed_whole))
            for request in requests
        ]
        return super().advance(own, seconds, gone)

    def stream_share(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[Answer]]]:
        """Like `generate_share`, but yields each prompt as its answers finish."""
        mine = range(self.rank, len(prompts), self.world_size)
        sampling = sampling._replace(seed_whole=self._seed_whole)
        yield from (
            (mine[i], group)
            for i, group in self.stream([prompts[i] for i in mine], [seeds[i] for i in mine], sampling)
        )
