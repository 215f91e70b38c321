"""The sampler role: one vLLM engine as a Ray worker's object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from rlhf_core.rollout.engine import Answer, Sampler, library
from rlhf_core.rollout.weight_transfer import Rendezvous, Route


def prepare(kv_cache_gib: float) -> None:
    """Imports what the role needs that this module does not."""
    library(kv_cache_gib)


class SamplerRole:
    """An engine of a group. Engine r of R answers prompts r, r + R, ...; each carries its own seed, so the split changes nothing."""

    def __init__(
        self,
        model: str,
        seed: int,
        max_model_len: int,
        dtype: str,
        kv_cache_gib: float,
        gpu_memory_utilization: float,
        trust_remote_code: bool,
        can_sleep: bool = False,
        tensor_parallel_size: int = 1,
        seed_answers: bool = False,
        routing_replay: bool = False,
    ):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # The engine is alone in this process: torch.distributed variables of the group would make it wait for others.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        self.sampler = Sampler(
            model,
            seed=seed,
            max_model_len=max_model_len,
            dtype=dtype,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
            can_sleep=can_sleep,
            tensor_parallel_size=tensor_parallel_size,
            routing_replay=routing_replay,
        )
        self._first = self.rank * tensor_parallel_size
        self._seed_whole = torch.cuda.is_available() and not seed_answers

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        n: int,
    ) -> list[tuple[int, list[Answer]]]:
        """Answers to this engine's share, with the prompts' indices."""
        mine = range(self.rank, len(prompts), self.world_size)
        answers = self.sampler.generate(
            [prompts[i] for i in mine],
            seeds=[seeds[i] for i in mine],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            n=n,
            seed_whole=self._seed_whole,
        )
        return list(zip(mine, answers, strict=True))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        n: int,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Answer]]]:
        """As `generate`, prompt by prompt as their answers are finished."""
        mine = range(self.rank, len(prompts), self.world_size)
        answers = self.sampler.stream(
            [prompts[i] for i in mine],
            seeds=[seeds[i] for i in mine],
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            n=n,
            seed_whole=self._seed_whole,
            logprobs=logprobs,
        )
        yield from ((mine[i], group) for i, group in answers)

    def cards(self) -> list[str | None]:
        return self.sampler.cards()

    def open_channel(self, route: Route, rendezvous: Rendezvous) -> None:
        self.sampler.open_channel(route, rendezvous, self._first)

    def receive_weights(self) -> None:
        self.sampler.receive_weights()

    def sleep(self, keep_weights: bool) -> None:
        self.sampler.sleep(keep_weights)

    def wake(self) -> None:
        self.sampler.wake()

    def prompt_logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        return self.sampler.prompt_logprobs(documents)
