"""Defines an episode: its request, its result, and the engines that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlhf_core.data.documents import Prompt
from rlhf_core.environments.trajectories.joined_trajectories import JoinedTrajectories
from rlhf_core.rollout.engine_contract import Pictures, SampledAnswer, Sampling


@dataclass(frozen=True)
class Episode:
    """A finished episode. `rewards`: one per answer, or empty if all attempts failed; `failure` is then the
    reason why the last attempt failed. `attempts`: the number of attempts. `seconds`: the environment's own
    time in the last attempt."""

    trajectory: JoinedTrajectories
    rewards: list[float]
    failure: str
    attempts: int
    seconds: float


class EpisodeRequest(NamedTuple):
    """An episode to run: the prompt, the seed of its answers, and the seed shared by all answers to this
    prompt."""

    prompt: Prompt
    seed: int
    shared: int


class EnginePool(Protocol):
    """The interface of engines that answer single requests, which `rlhf_core.rollout.dispatch.Engines`
    implements."""

    def reserve(self) -> int: ...

    def release(self, engine: int) -> None: ...

    async def ask(
        self, engine: int, tokens: list[int], seed: int, sampling: Sampling, pictures: Pictures
    ) -> SampledAnswer: ...
