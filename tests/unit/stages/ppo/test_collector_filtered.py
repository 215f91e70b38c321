"""Dynamic filtering beside the training: what the collector replaces, until when, and how old answers get."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhf_core.data.documents import Prompt
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.collector import Collector
from rlhf_core.stages.ppo.sampling.group_signal import most_batches, rounds_of
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder
from tests.support.filtered_groups import (
    BATCH,
    ORDER,
    PROMPTS,
    World,
    collect,
    recorded,
    setup,
    third,
)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_groups_without_signal_are_replaced_and_no_prompt_is_lost(
    background: Background, staleness: int
) -> None:
    world = World(third)
    found = recorded(world, setup())
    collector = collect(background, world, found, staleness, 10)
    assert all(len(kept) == BATCH and all(map(third, kept)) for kept in found.kept)
    state = collector.state()
    assert (state.open, state.ready, state.dropped, state.rewards) == ([], {}, {}, {})
    assert sorted(found.looked_at) == sorted(world.asked) == list(range(state.next)), "each once"
    assert state.next > 20 * BATCH


def test_metrics_are_of_the_groups_looked_at(background: Background) -> None:
    world = World(lambda place: place > 4)  # three of the eight that are begun at first
    found = recorded(world, setup())
    collector = Collector(background, world.answer, ORDER, 2, 4, group_filter=found)
    sampled = collector.take()
    assert sampled is not None and sampled.rewards is not None
    groups = found.iterations[0]
    shares = [0.5 if group.kept else 3.0 for group in groups]
    assert sampled.metrics["filter/accepted"] == sum(group.kept for group in groups) / len(groups) < 1
    assert sampled.metrics["filter/groups"] == BATCH
    assert sampled.metrics["filter/rounds"] == rounds_of(len(groups) / BATCH)
    assert sampled.metrics["reward/mean"] == pytest.approx(np.mean(shares)), "of all groups"
    assert sampled.metrics["filter/reward_mean"] == 0.5
    assert sampled.rewards.by_source["reward_model"].tolist() == [0, 1] * BATCH
    assert {"rollout/age", "rollout/waiting", "rollout/lead"} <= sampled.metrics.keys()


def test_where_all_have_a_signal_nothing_is_replaced(background: Background) -> None:
    world = World(lambda place: True)
    found = recorded(world, setup())
    collect(background, world, found, 2, 6)
    assert all(group.kept for groups in found.iterations for group in groups)
    assert sorted(world.asked) == list(range(6 * BATCH))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_where_none_has_a_signal_the_run_ends_at_the_limit(background: Background, rounds: int) -> None:
    world = World(lambda place: False)
    found = recorded(world, setup(rounds))
    collector = Collector(background, world.answer, ORDER, 2, 6, group_filter=found)
    sentence = rf"dynamic_filtering: none of the \d+ groups of {rounds} rounds had answers of different"
    with pytest.raises(ValueError, match=sentence):
        collector.take()
    limit = BATCH * most_batches(rounds)
    assert limit <= len(world.asked) <= limit + 2 * BATCH, "with those that were open at the limit"
    assert sorted(found.looked_at) == sorted(world.asked)


@pytest.mark.parametrize(("rounds", "every"), [(1, 2), (2, 12)])
def test_at_the_limit_what_is_there_is_trained_on(background: Background, rounds: int, every: int) -> None:
    """One prompt of `every` has a signal, and an iteration looks at 4 or 20 groups."""
    world = World(lambda place: place % every == 0)
    found = recorded(world, setup(rounds))
    collector = collect(background, world, found, 2, 6)
    assert all(1 <= len(kept) <= BATCH for kept in found.kept)
    assert sum(map(len, found.kept)) < 6 * BATCH
    assert all(len(groups) <= BATCH * (most_batches(rounds) + 4) for groups in found.iterations)
    assert len(set(found.looked_at)) == len(found.looked_at)
    assert set(found.looked_at) <= set(world.asked) == set(range(collector.state().next))


def test_with_one_round_nothing_is_replaced(background: Background) -> None:
    world = World(lambda place: place == 1)
    found = recorded(world, setup(1))
    collector = Collector(background, world.answer, ORDER, 2, 1, group_filter=found)
    assert collector.take() is not None
    assert found.kept == [[1]] and sorted(world.asked) == list(range(BATCH))


def test_the_limit_waits_for_no_open_answer_and_stop_ends_them(background: Background) -> None:
    """An iteration gets what there is at the limit of 20 groups, while two answers go on without end."""
    ended: list[int] = []
    world = World(lambda place: place in (0, 3))

    async def answer(prompt: Prompt, seed: int) -> list[Rollout]:
        place = world.places[seed]
        if place in (5, 7):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(place)
                raise
        return await world.answer(prompt, seed)

    found = recorded(world, setup(2))
    collector = Collector(background, answer, ORDER, 2, 2, group_filter=found)
    sampled = collector.take()
    assert sampled is not None and found.kept[0] and set(found.kept[0]) <= {0, 3}
    assert sampled.metrics["filter/groups"] == len(found.kept[0])
    assert 20 <= len(found.looked_at) <= 22
    collector.stop()
    assert {5, 7} <= set(ended) and not collector._working


def test_the_limit_is_that_of_filtering_in_turn() -> None:
    """In turn, a round asks for at most MOST batches, and the first for one."""
    assert [most_batches(rounds) for rounds in (1, 2, 3)] == [1, 5, 9]
    assert [rounds_of(batches) for batches in (0.25, 1, 1.25, 5, 5.25, 9)] == [1, 1, 2, 2, 3, 3]


def test_a_batch_of_one(background: Background) -> None:
    order = PromptOrder(PROMPTS[:1], 1, 0)
    world = World(lambda place: place % 3 == 2, order)
    found = recorded(world, setup(order=order))
    collect(background, world, found, 1, 4, order=order)
    assert [kept[0] % 3 for kept in found.kept] == [2] * 4
    assert sorted(found.looked_at) == list(range(max(found.looked_at) + 1))


@pytest.mark.parametrize("differs", [True, False])
def test_an_answer_that_would_be_too_old_is_waited_for(background: Background, differs: bool) -> None:
    """The first answer takes until the second iteration. Its group is trained on then, or its replacement is, which
    may wait for one more."""
    world = World(lambda place: differs or place > 0)

    async def event() -> asyncio.Event:
        return asyncio.Event()

    world.held[0] = background.run(event())
    found = recorded(world, setup())
    collector = collect(background, world, found, 1, 4, until=1)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(collector.take)
        background.run(asyncio.sleep(0.05))
        assert not second.done(), "the others are finished"

        async def release() -> None:
            world.held[0].set()

        background.run(release())
        sampled = second.result()
    assert sampled is not None and sampled.metrics["rollout/age_max"] <= 1
    assert (0 in found.kept[1]) == differs and len(found.kept[1]) == BATCH
    assert 0 not in found.kept[0]
