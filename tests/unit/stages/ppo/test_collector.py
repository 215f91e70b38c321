"""The collector of asynchronous training, against answers that take times of their own: order, age, state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.cluster.pending import RoleFailed
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.collector import Collected, Collector
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder
from rlhf_core.stages.ppo.sampling.stored import read_collected, write_collected

PROMPTS = [Prompt(({"role": "user", "content": str(i)},), [i + 10], {}, False) for i in range(20)]
ORDER = PromptOrder(PROMPTS, 4, 0)
BATCH = 4


class World:
    """Answers prompts after seconds of a heavy tail; each answer says the weights that there were when it
    began and when it ended."""

    def __init__(self, slow: float = 0.004):
        self.version = 0
        self.asked = list[int]()
        self.slow = slow
        self._rng = random.Random(1)
        self.down = False

    async def answer(self, prompt: Prompt, seed: int) -> list[Rollout]:
        self.asked.append(prompt.tokens[0])
        begun = self.version
        await asyncio.sleep(self.slow * self._rng.lognormvariate(0, 1.5))
        if self.down:
            raise RoleFailed("the engine died")
        document = Document([*prompt.tokens, 1, 2, 3], [False, True, True, True])
        return [
            Rollout(prompt, document, np.zeros(4, np.float32), True, versions=[(1, begun), (3, self.version)])
            for _ in range(2)
        ]


def collect(
    background: Background, world: World, staleness: int, iterations: int, seconds: float, **how: Any
) -> list[list[Rollout]]:
    collector = Collector(background, world.answer, ORDER, staleness, iterations, **how)
    found = []
    for _ in range(how.get("iteration", 0), iterations):
        sampled = collector.take()
        assert sampled is not None
        found.append(sampled.rollouts)
        begun = [version for rollout in sampled.rollouts for _, version in rollout.versions]
        assert world.version - min(begun) <= staleness and sampled.metrics[
            "rollout/age_max"
        ] == world.version - min(begun)
        background.run(asyncio.sleep(seconds))  # the training
        world.version += 1
        collector.updates = world.version
        collector.next_iteration()
    return found


def prompts_of(found: Sequence[Sequence[Rollout]]) -> list[int]:
    return [rollout.prompt.tokens[0] for iteration in found for rollout in iteration[::2]]


@pytest.mark.parametrize("staleness", [2, 4])
def test_every_prompt_is_trained_on_once_and_none_is_too_old(background: Background, staleness: int) -> None:
    world = World()
    found = collect(background, world, staleness, 10, 0.01)
    assert all(len(iteration) == 2 * BATCH for iteration in found)
    expected = sorted(prompt.tokens[0] for prompt, _ in ORDER.take(0, 10 * BATCH))
    assert sorted(prompts_of(found)) == sorted(world.asked) == expected
    assert prompts_of(found) != [prompt.tokens[0] for prompt, _ in ORDER.take(0, 10 * BATCH)], (
        "long answers come later"
    )


def test_answers_are_no_older_than_needed(background: Background) -> None:
    """Engines that are faster than the training answer for the next iteration alone."""
    found = collect(background, World(slow=0.0001), 8, 12, 0.02)
    for iteration, rollouts in enumerate(found[8:], 8):
        assert all(version >= iteration - 1 for rollout in rollouts for _, version in rollout.versions)


def test_what_nobody_will_train_on_is_ended(background: Background) -> None:
    ended: list[str] = []

    async def answer(prompt: Prompt, seed: int) -> list[Rollout]:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError("nobody waits so long")

    collector = Collector(background, answer, ORDER, 2, 8)
    background.run(asyncio.sleep(0.01))
    collector.stop()
    assert ended == ["cancelled"] * 2 * BATCH and collector.state().ready == {}


def test_a_state_loses_no_prompt_and_repeats_none(background: Background, tmp_path: Path) -> None:
    world = World(slow=0.05)
    collector = Collector(background, world.answer, ORDER, 3, 8)
    trained = []
    for _ in range(3):
        trained.append(collector.take().rollouts)  # type: ignore[union-attr]
        world.version += 1
        collector.updates = world.version
        world.slow = 0.05 if world.version < 3 else 1000.0
        collector.next_iteration()
    state = collector.state()
    world.slow = 0.05
    assert state.open, "something is being answered"
    write_collected(tmp_path, state)
    known = read_collected(tmp_path, ORDER)
    assert (known.next, known.open, known.begun) == (state.next, state.open, state.begun)
    for (place, before), (same_place, after) in zip(state.ready.items(), known.ready.items(), strict=True):
        assert place == same_place
        for one, other in zip(before, after, strict=True):
            assert (
                one.document == other.document
                and one.prompt == other.prompt
                and list(one.versions) == list(other.versions)
            )
            np.testing.assert_array_equal(one.sampler_logprobs, other.sampler_logprobs)
    again = Background()  # as another process, after a kill
    try:
        rest = collect(again, world, 3, 8, 0.0, iteration=3, updates=3, known=known)
    finally:
        again.close()
    assert sorted(prompts_of([*trained, *rest])) == sorted(
        prompt.tokens[0] for prompt, _ in ORDER.take(0, 8 * BATCH)
    )


def test_a_failure_is_told(background: Background) -> None:
    world = World()
    collector = Collector(background, world.answer, ORDER, 2, 5)
    collector.take()
    world.down = True
    collector.next_iteration()
    with pytest.raises(RoleFailed, match="the engine died"):
        for _ in range(3):
            collector.take()


def test_ages_of_tokens() -> None:
    document = Document([1, 2, 3, 4, 5, 6], [False, True, True, False, True, True])
    rollout = Rollout(
        PROMPTS[0], document, np.zeros(6, np.float32), True, versions=[(1, 0), (2, 1), (4, 3), (5, 4)]
    )
    assert rollout.ages(5).tolist() == [5, 4, 2, 1]


def test_nothing_waits_in_an_empty_state(tmp_path: Path) -> None:
    assert read_collected(tmp_path, ORDER) == Collected()
    write_collected(tmp_path, Collected(8, []))
    assert read_collected(tmp_path, ORDER) == Collected(8, [])
