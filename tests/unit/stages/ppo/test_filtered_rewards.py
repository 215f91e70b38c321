"""Dynamic filtering beside the training: requests for rewards, their failures, and the metrics of groups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.collector import Collector
from rlhf_core.stages.ppo.sampling.group_signal import allowed_of
from tests.support.filtered_groups import (
    BATCH,
    ORDER,
    N,
    World,
    place_of,
    recorded,
    setup,
    third,
)
from tests.support.micro import wait_until


def test_groups_that_finish_during_a_request_share_the_next_one(background: Background) -> None:
    """The first request for rewards waits until all the others have finished."""
    world = World(lambda place: True, slow=0.0)
    gate = threading.Event()
    sizes: list[int] = []

    class Gated:
        def reward(self, rollouts: Sequence[Rollout], allowed: int) -> Rewards:
            sizes.append(len(rollouts) // N)
            assert gate.wait(60)
            return world.reward(rollouts, allowed)

    found = recorded(Gated(), setup())
    collector = Collector(background, world.answer, ORDER, 2, 2, group_filter=found)
    wait_until(lambda: sizes and sizes[0] + len(found._waiting) == 2 * BATCH, "the others", 60)
    gate.set()
    collector.take()
    wait_until(lambda: sum(sizes) == 2 * BATCH, "their request", 60)
    assert len(sizes) <= 2


def test_a_failing_source_is_told(background: Background) -> None:
    world = World(lambda place: True)
    world.failing = True
    collector = Collector(background, world.answer, ORDER, 2, 5, group_filter=recorded(world, setup()))
    with pytest.raises(RewardsFailed, match="the source is gone"):
        collector.take()


def test_failures_count_against_the_limit_of_an_iteration(background: Background) -> None:
    """One answer of a group has no reward: the group has no signal, and one failure an iteration is allowed."""

    class Failing(World):
        def reward(self, rollouts: Sequence[Rollout], allowed: int) -> Rewards:
            rewards = super().reward(rollouts, allowed)
            values = rewards.by_source["reward_model"]
            values[[place_of(r) < 2 and j % N == 0 for j, r in enumerate(rollouts)]] = np.nan
            return rewards

    for allowed, passes in ((2, True), (1, False)):
        world = Failing(lambda place: True)
        found = recorded(world, setup(1, allowed=allowed))
        collector = Collector(background, world.answer, ORDER, 2, 1, group_filter=found)
        if passes:
            sampled = collector.take()
            assert sampled is not None and found.kept == [[2, 3]]
            assert sampled.metrics["reward/reward_model/failed"] == 2
            continue
        with pytest.raises(RewardsFailed, match="left 2 of 8 answers without a reward, more than the 1"):
            collector.take()


@pytest.mark.parametrize("staleness", [1, 4])
def test_the_curve_does_not_fall_when_no_groups_are_begun_any_more(
    background: Background, staleness: int
) -> None:
    """Each group counts when its rewards are known. Kept ones that wait for the last iterations do not count
    again there, where nothing is dropped."""
    world = World(third, slow=0.0)
    found = recorded(world, setup())
    collector = Collector(background, world.answer, ORDER, staleness, 12, group_filter=found)
    shares = []
    for _ in range(12):
        background.run(asyncio.sleep(0.01))
        sampled = collector.take()
        assert sampled is not None
        shares.append((sampled.metrics["reward/mean"], sampled.metrics["filter/accepted"]))
        world.version += 1
        collector.updates = world.version
        collector.next_iteration()
    counted = [[place_of(group.rollouts[0]) for group in groups] for groups in found.iterations]
    assert sorted(place for places in counted for place in places) == list(range(collector.state().next))
    for places, (mean, accepted), before in zip(counted, shares, [(0.0, 0.0), *shares], strict=False):
        if not places:
            assert (mean, accepted) == before, "the last groups describe the policy"
            continue
        assert accepted == pytest.approx(np.mean([third(place) for place in places]))
        assert mean == pytest.approx(np.mean([0.5 if third(place) else 3.0 for place in places]))


def test_the_first_error_ends_the_requests(background: Background) -> None:
    world = World(third)
    world.failing = True
    found = recorded(world, setup())
    collector = Collector(background, world.answer, ORDER, 2, 4, group_filter=found)
    with pytest.raises(RewardsFailed, match="the source is gone"):
        collector.take()
    background.run(asyncio.sleep(0.05))
    world.failing = False
    asked = len(world.requests)
    collector.stop()
    assert len(world.requests) == asked == 1


@pytest.mark.parametrize(("answers", "allowed"), [(1, 3), (32, 3), (33, 3), (64, 6), (320, 30)])
def test_more_answers_may_fail_more_often(answers: int, allowed: int) -> None:
    of = SimpleNamespace(allowed_failures=3, order=SimpleNamespace(batch=8), sampling=SimpleNamespace(n=4))
    assert allowed_of(answers, of) == allowed  # type: ignore[arg-type]
