"""Dynamic filtering beside the training: what the collector replaces, until when, how old answers get, and what
a state keeps."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, Term
from rlhf_core.rewards.reward_contract import RewardsFailed
from rlhf_core.rollout.dispatch import Background
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.stages.ppo.rollout_records import Rollout, restored_rewards, stored_rewards
from rlhf_core.stages.ppo.sampling.collector import Collected, Collector
from rlhf_core.stages.ppo.sampling.group_filter import FoundGroup, GroupFilter
from rlhf_core.stages.ppo.sampling.group_signal import allowed_of, most_batches, rounds_of
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled, Setup
from rlhf_core.stages.ppo.sampling.stored import COLLECTED, read_collected, write_collected
from tests.support.micro import wait_until

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


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


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


def test_rewards_wait_on_disk_bit_for_bit() -> None:
    values = {"a": np.array([0.1 + 0.2, np.nan, -1e300]), "b": np.array([1.0, 2.0, 3.0])}
    rewards = Rewards(values, {"a": "timed out"}, {"b": {2: [(3, 0.5), (7, -0.25)]}})
    back = restored_rewards(stored_rewards(rewards))
    for name, found in values.items():
        assert back.by_source[name].tobytes() == found.tobytes()
    assert (back.errors, back.steps) == (rewards.errors, rewards.steps)
    assert restored_rewards(stored_rewards(Rewards({"a": values["b"]}, {}))).steps == {}


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
