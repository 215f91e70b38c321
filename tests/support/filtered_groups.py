"""A double of engines and rewards whose groups have a signal or not, for tests of filtering beside the training."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, Term
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.collector import Collector
from rlhf_core.stages.ppo.sampling.group_filter import FoundGroup, GroupFilter
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled, Setup

N = 2
BATCH = 4
PROMPTS = [Prompt(({"role": "user", "content": str(i)},), [i + 10], {}, False) for i in range(20)]
ORDER = PromptOrder(PROMPTS, BATCH, 0)
Differs = Callable[[int], bool]  # whether the rewards of the group at a place differ


def setup(rounds: int = 10, order: PromptOrder = ORDER, normalize: Any = "none", allowed: int = 0) -> Setup:
    sizes = {"n_samples_per_prompt": N, "train_batch_size": N, "micro_train_batch_size": N}
    config = PPO(
        prompts=Data(sources="p.jsonl"),
        rollout_batch_size=order.batch,
        advantage_estimator="grpo",
        dynamic_filtering=True,
        max_filter_rounds=rounds,
        max_staleness=2,
        **sizes,
    )
    terms = [Term("reward_model", 1.0, normalize, None)]
    return Setup(config, order, Sampling(N, 1.0, 8, [0]), terms, [], allowed)


class World:
    """Answers and rewards prompts after times of their own. The first token of an answer is the place of its
    prompt, by which `differs` decides whether its group has a signal."""

    def __init__(self, differs: Differs, order: PromptOrder = ORDER, slow: float = 0.001):
        self.differs = differs
        self.version = 0
        self.places = {seed: place for place, (_, seed) in enumerate(order.take(0, 4000))}
        self.asked = list[int]()
        self.requests = list[int]()  # groups in each request for rewards
        self.open = 0
        self.held = dict[int, asyncio.Event]()  # by place
        self.failing = False
        self._slow = slow
        self._rng = random.Random(1)

    async def answer(self, prompt: Prompt, seed: int) -> list[Rollout]:
        place = self.places[seed]
        self.asked.append(place)
        begun = self.version
        if place in self.held:
            await self.held[place].wait()
        await asyncio.sleep(self._slow * self._rng.lognormvariate(0, 1.5))
        document = Document([*prompt.tokens, place, 2, 3], [False, True, True, True])
        versions = [(1, begun), (3, self.version)]
        logprobs = np.zeros(4, np.float32)
        return [Rollout(prompt, document, logprobs, True, versions=versions) for _ in range(N)]

    def reward(self, rollouts: Sequence[Rollout], allowed: int) -> Rewards:
        assert self.open == 0, "one request at a time"
        self.open += 1
        self.requests.append(len(rollouts) // N)
        places = [place_of(rollout) for rollout in rollouts]
        self.open -= 1
        if self.failing:
            raise RewardsFailed("the source is gone")
        values = [float(j % N) if self.differs(place) else 3.0 for j, place in enumerate(places)]
        return Rewards({"reward_model": np.array(values)}, {})


class Recorded(GroupFilter):
    """Records the groups of each iteration."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.iterations = list[list[FoundGroup]]()
        self.kept = list[list[int]]()

    def sampled(self, kept: Sequence[FoundGroup], looked_at: Sequence[FoundGroup], position: int) -> Sampled:
        self.iterations.append(list(looked_at))
        self.kept.append([place_of(group.rollouts[0]) for group in kept])
        return super().sampled(kept, looked_at, position)

    @property
    def looked_at(self) -> list[int]:
        return [place_of(group.rollouts[0]) for groups in self.iterations for group in groups]


def place_of(rollout: Rollout) -> int:
    return int(rollout.document.tokens[1])


def recorded(world: Any, of: Setup, statistics: dict[str, Running] | None = None) -> Recorded:
    return Recorded(world, of, statistics or {})


def collect(
    background: Background, world: World, found: Recorded, staleness: int, iterations: int, **how: Any
) -> Collector:
    """Takes the answers of all iterations left, or of `until`. Each must keep the limit of age."""
    until = how.pop("until", iterations)
    order = how.pop("order", ORDER)
    collector = Collector(background, world.answer, order, staleness, iterations, group_filter=found, **how)
    for _ in range(how.get("iteration", 0), until):
        sampled = collector.take()
        assert sampled is not None and sampled.metrics["rollout/age_max"] <= staleness
        assert [place_of(r) for r in sampled.rollouts[::N]] == found.kept[-1]
        assert sampled.rewards is not None and len(sampled.rewards) == len(sampled.rollouts)
        world.version += 1
        collector.updates = world.version
        collector.next_iteration()
    return collector


def third(place: int) -> bool:
    return random.Random(place).random() < 1 / 3
