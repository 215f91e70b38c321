"""The sampler role: one vLLM engine as a Ray worker's object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlhf_core.cluster.rank_environment import RANK_VARIABLES
from rlhf_core.rollout.engine import Answer, Sampler, Sampling, library


def prepare(kv_cache_gib: float) -> None:
    """Imports what the role needs that this module does not."""
    library(kv_cache_gib)


class SamplerRole(Sampler):
    """An engine of a group. Engine r of R answers prompts r, r + R, ...; each has its own seed, so the split changes nothing."""

    def __init__(self, model: str, *, tensor_parallel_size: int = 1, seed_answers: bool = False, **options: Any):
        """`seed_answers`: seeds each answer also on a GPU; `options`: of `Sampler`."""
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # The engine is alone in this process: torch.distributed variables of the group would make it wait for others.
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        super().__init__(model, tensor_parallel_size=tensor_parallel_size, **options)
        self.first = self.rank * tensor_parallel_size
        self._seed_whole = torch.cuda.is_available() and not seed_answers

    def generate_share(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[tuple[int, list[Answer]]]:
        """Answers to this engine's share, with the prompts' indices."""
        mine = range(self.rank, len(prompts), self.world_size)
        sampling = sampling._replace(seed_whole=self._seed_whole)
        return list(zip(mine, self.generate([prompts[i] for i in mine], [seeds[i] for i in mine], sampling), strict=True))

    def stream_share(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[Answer]]]:
        """As `generate_share`, prompt by prompt as their answers are finished."""
        mine = range(self.rank, len(prompts), self.world_size)
        sampling = sampling._replace(seed_whole=self._seed_whole)
        yield from ((mine[i], group) for i, group in self.stream([prompts[i] for i in mine], [seeds[i] for i in mine], sampling))
