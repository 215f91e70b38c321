"""Dynamic filtering beside the training: what a resume state keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.rewards.clients import Rewards
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import restored_rewards, stored_rewards
from rlhf_core.stages.ppo.sampling.collector import Collected, Collector
from rlhf_core.stages.ppo.sampling.group_signal import most_batches
from rlhf_core.stages.ppo.sampling.stored import COLLECTED, read_collected, write_collected
from tests.support.filtered_groups import (
    BATCH,
    ORDER,
    N,
    World,
    collect,
    place_of,
    recorded,
    setup,
    third,
)
from tests.support.micro import wait_until


@pytest.mark.parametrize("kill_at", [1, 2, 4, 7])
@pytest.mark.parametrize("rounds", [10, 1])
def test_a_resumed_run_loses_and_repeats_no_prompt(
    background: Background, tmp_path: Path, kill_at: int, rounds: int
) -> None:
    """Each answer is in the running statistics once. One round: iterations get what there is."""
    world = World(third)
    how = setup(rounds, normalize="running")
    before = recorded(world, how)
    collector = collect(background, world, before, 2, 8, until=kill_at)
    background.run(asyncio.sleep(0.003))
    state = collector.state()
    collector.stop()
    write_collected(tmp_path, state)
    known = read_collected(tmp_path, ORDER)
    assert (known.next, known.open, known.begun) == (state.next, state.open, state.begun)
    for one, other in ((known.ready, state.ready), (known.dropped, state.dropped)):
        assert list(one) == list(other)
        for place, rollouts in one.items():
            assert [place_of(rollout) for rollout in rollouts] == [place] * N
            assert rollouts[0].prompt == ORDER.take(place, 1)[0][0]
    assert set(state.rewards) == {*state.ready, *state.dropped} == set(known.rewards)
    new = state.ready.keys() - set(state.counted)
    assert (list(known.counted), known.looked_at) == (list(state.counted), state.looked_at)
    accounted = [*before.looked_at, *state.open, *new, *state.dropped]
    assert sorted(accounted) == list(range(state.next)), "every prompt is in one place"
    again = Background()  # as another process, after a kill
    after = recorded(world, how, dict(before._statistics))
    try:
        where = {"iteration": kill_at, "updates": kill_at, "known": known}
        last = collect(again, world, after, 2, 8, **where).state()
    finally:
        again.close()
    looked_at = [*before.looked_at, *after.looked_at]
    assert len(set(looked_at)) == len(looked_at)
    if rounds > 1:
        assert sorted(looked_at) == list(range(last.next))
    assert all(map(third, [place for kept in (*before.kept, *after.kept) for place in kept]))
    assert after._statistics["reward_model"].number == N * len(looked_at)


def test_a_state_has_the_dropped_groups(background: Background, tmp_path: Path) -> None:
    """So that the test above says something: the first batches have no signal, the next are never finished."""
    world = World(lambda place: False)

    async def event() -> asyncio.Event:
        return asyncio.Event()

    forever = background.run(event())
    world.held = {place: forever for place in range(3 * BATCH, 6 * BATCH)}
    found = recorded(world, setup(2))
    collector = Collector(background, world.answer, ORDER, 2, 8, group_filter=found)
    wait_until(lambda: len(collector.state().dropped) == 3 * BATCH, "the dropped groups", 60)
    state = collector.state()
    assert state.open == list(range(3 * BATCH, 5 * BATCH)) and state.next == 5 * BATCH
    assert list(state.dropped) == list(range(3 * BATCH)) and not state.ready
    write_collected(tmp_path, state)
    known = read_collected(tmp_path, ORDER)
    assert list(known.dropped) == list(state.dropped)
    collector.stop()
    world.held.clear()
    again = recorded(world, setup(2))
    collector = Collector(background, world.answer, ORDER, 2, 8, known=known, group_filter=again)
    with pytest.raises(ValueError, match="none of the"):
        collector.take()
    assert len(again.looked_at) <= BATCH * most_batches(2) + 2 * BATCH, (
        "the limit counts what was dropped before"
    )


def test_a_state_of_a_run_without_filtering_is_read(tmp_path: Path) -> None:
    write_collected(tmp_path, Collected(8, [3]))
    file = tmp_path / COLLECTED
    head = json.loads(file.read_text())
    file.write_text(json.dumps({key: head[key] for key in ("next", "open", "groups")}) + "\n")
    assert read_collected(tmp_path, ORDER) == Collected(8, [3])


def test_rewards_wait_on_disk_bit_for_bit() -> None:
    values = {"a": np.array([0.1 + 0.2, np.nan, -1e300]), "b": np.array([1.0, 2.0, 3.0])}
    rewards = Rewards(values, {"a": "timed out"}, {"b": {2: [(3, 0.5), (7, -0.25)]}})
    back = restored_rewards(stored_rewards(rewards))
    for name, found in values.items():
        assert back.by_source[name].tobytes() == found.tobytes()
    assert (back.errors, back.steps) == (rewards.errors, rewards.steps)
    assert restored_rewards(stored_rewards(Rewards({"a": values["b"]}, {}))).steps == {}
