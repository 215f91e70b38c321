"""Keeps the engines busy while the models train: starts prompts in order, and collects answers as they
finish.

With `max_staleness` k, an iteration trains on answers started at most k iterations earlier. At most
(iteration + k + 1) batches are started by then (Fu et al. 2025, "AReaL", eq. 3), and an iteration waits for
answers that would otherwise become too old. A long answer may therefore continue over up to k updates; the
version of the weights that sampled each token is recorded. With fast engines, fewer batches are started, so
that answers are no older than is needed to keep the models busy.

With a filter, a group without a signal is dropped, and the next prompt in the order is started at once. The
number of groups that are started but not yet trained on stays the same, so replacements respect the age
limit. Once as many groups as filtering allows have been started since the last iteration, dropped groups are
no longer replaced. The iteration then uses the groups it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rlhf_core.data.documents import Prompt
from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.group_filter import FoundGroup, GroupFilter
from rlhf_core.stages.ppo.sampling.group_signal import OF_KEPT
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.sampled_answers import MeasuredGroups, PromptOrder, Sampled, Setup

AnswerPrompt = Callable[[Prompt, int], Awaitable[list[Rollout]]]


class Collected(NamedTuple):
    """Holds the state of a collector between two iterations: the next place in the prompt order to start, and
    the places whose prompts are being answered. Two fields are keyed by place: the iterations in which
    prompts were `begun`, and all answers to the prompts that are `ready`.

    With a filter, two more fields are keyed by place: the answers `dropped` since the last iteration, and the
    `rewards` of all answers held here. It also holds the places of ready groups that are already `counted` in
    metrics and statistics, and the metrics of the last groups that were `looked_at`.
    """

    next: int = 0
    open: Sequence[int] = ()
    begun: Mapping[int, int] = {}
    ready: Mapping[int, list[Rollout]] = {}
    dropped: Mapping[int, list[Rollout]] = {}
    rewards: Mapping[int, Rewards] = {}
    counted: Collection[int] = ()
    looked_at: Mapping[str, float] = {}


class Collector:
    """Collects groups for a run of `iterations` iterations, starting with `iteration`. `answer` answers a
    prompt with its seed.

    `updates` is the number of the actor's updates so far, which is the version of the weights. `died` is set
    while an engine is dead. `group_filter` is None if every group is trained on.
    """

    def __init__(
        self,
        background: Background,
        answer: AnswerPrompt,
        order: PromptOrder,
        staleness: int,
        iterations: int,
        iteration: int = 0,
        updates: int = 0,
        known: Collected = Collected(),  # noqa: B008 it is a tuple
        died: asyncio.Event | None = None,
        group_filter: GroupFilter | None = None,
    ):
        self._background = background
        self._answer = answer
        self._order = order
        self._staleness = staleness
        self._iterations = iterations
        self._iteration = iteration
        self.updates = updates
        self._lead = 1  # batches started beyond the iteration's own
        self._next = known.next
        self._ready = dict(known.ready)
        self._begun = dict(known.begun)
        self._filter = group_filter
        self._dropped = dict(known.dropped)
        self._rewards = dict(known.rewards)
        self._counted = set(known.counted)
        self._looked_at = dict(known.looked_at)
        self._working = set[asyncio.Task[None]]()
        self._failed: BaseException | None = None
        self._arrived = asyncio.Event()
        self._died = died or asyncio.Event()
        background.run(self._begin(known.open))

    async def _begin(self, again: Sequence[int] = ()) -> None:
        """Starts the prompts at the places `again`, and all new prompts that are allowed now."""
        for place in again:
            self._start(place)
        while len(self._begun) < self._most_begun:
            self._start_next()

    @property
    def _most_begun(self) -> int:
        """Returns how many groups may have been started but not yet trained on when an iteration begins."""
        return min(self._lead + 1, self._iterations - self._iteration) * self._order.batch

    def _start_next(self) -> None:
        self._start(self._next)
        self._next += 1

    def _start(self, place: int) -> None:
        self._begun[place] = self._iteration
        # taken here, so that a curriculum draws prompts in the order of their places
        ((prompt, seed),) = self._order.take(place, 1)
        task = asyncio.create_task(self._collect(place, prompt, seed))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _collect(self, place: int, prompt: Prompt, seed: int) -> None:
        try:
            rollouts = await self._answer(prompt, seed)
            if self._filter is None:
                self._ready[place] = rollouts
            else:
                await self._sort(place, rollouts, self._filter)
        except Exception as error:
            self._failed = self._failed or error
        self._arrived.set()

    async def _sort(self, place: int, rollouts: list[Rollout], group_filter: GroupFilter) -> None:
        """Keeps a group that has a signal. Drops any other group and, up to the limit, starts the prompt that
        replaces it."""
        verdict = await group_filter.look_at(rollouts)
        self._rewards[place] = verdict.rewards
        if verdict.rewards.errors:
            group_filter.check([r for at, r in self._rewards.items() if at not in self._counted])
        if verdict.signal:
            self._ready[place] = rollouts
            return
        self._dropped[place] = rollouts
        del self._begun[place]
        others = self._most_begun - self._order.batch  # groups for the iterations after this one
        if len(self._dropped) + len(self._begun) < group_filter.limit + others:
            self._start_next()

    @property
    def _enough(self) -> bool:
        """Returns whether the finished groups fill an iteration, or no more groups will come for it. At the
        limit of filtering, one group is enough; if there is none, the collector waits for open groups."""
        if self._exhausted and (self._ready or not self._begun):
            return True
        return len(self._ready) >= self._order.batch

    @property
    def _exhausted(self) -> bool:
        """Returns whether filtering has examined as many groups for this iteration as it may."""
        looked_at = len(self._dropped) + len(self._ready)
        return self._filter is not None and looked_at >= self._filter.limit

    def take(self) -> Sampled | None:
        """Waits for an iteration's groups and returns finished groups, in prompt order. Returns None if an
        engine has died, because it may be the only one. Raises RoleFailed if engines fail in another way, and
        re-raises any error of a reward source or the filter."""
        return self._background.run(self._take())

    async def _take(self) -> Sampled | None:
        waiting = float(len(self._ready))
        waited = False
        while True:
            if self._failed is not None:
                raise self._failed
            if self._died.is_set():
                return None
            if self._enough and self._in_time():
                break
            waited = True
            self._arrived.clear()
            arrived = asyncio.create_task(self._arrived.wait())
            died = asyncio.create_task(self._died.wait())
            _, others = await asyncio.wait((arrived, died), return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        chosen = sorted(self._ready)[: self._order.batch]
        sampled = self._taken(chosen)
        if waited:
            self._lead = min(self._lead + 1, self._staleness)
        elif len(self._ready) >= self._order.batch:
            self._lead = max(self._lead - 1, 1)
        ages = np.concatenate(
            [np.zeros(0), *(found.ages(self.updates) for found in sampled.rollouts if found.versions)]
        )
        # empty if all episodes failed at once
        mean, most = (float(ages.mean()), float(ages.max())) if len(ages) else (0.0, 0.0)
        metrics = {"rollout/age": mean, "rollout/age_max": most, "rollout/waiting": waiting}
        metrics |= {"rollout/lead": float(self._lead)}
        return sampled._replace(metrics=sampled.metrics | metrics)

    def _taken(self, chosen: Sequence[int]) -> Sampled:
        """Removes the groups at the places `chosen`, and all dropped groups. Returns the answers of the
        chosen groups."""
        kept = {place: self._ready.pop(place) for place in chosen}
        for place in chosen:
            del self._begun[place]
        if self._filter is None:
            rollouts = [found for group in kept.values() for found in group]
            return Sampled(rollouts, None, self._next, {}, measured=MeasuredGroups(chosen))
        own = [FoundGroup(found, self._rewards[place], True) for place, found in kept.items()]
        rollouts_of = kept | self._ready | self._dropped
        looked_at = sorted(rollouts_of.keys() - self._counted)
        new = [
            FoundGroup(rollouts_of[place], self._rewards[place], place not in self._dropped)
            for place in looked_at
        ]
        sampled = self._filter.sampled(own, new, self._next)
        measured = MeasuredGroups(looked_at, join([group.rewards for group in new]) if new else None)
        for place in (*kept, *self._dropped):
            del self._rewards[place]
        self._dropped.clear()
        self._counted = set(self._ready)
        if new:
            self._looked_at = {name: value for name, value in sampled.metrics.items() if name not in OF_KEPT}
        # at the end of a run there may be no new groups; the last ones then describe the policy
        number = {"filter/looked_at": float(len(new))}
        return sampled._replace(metrics=self._looked_at | sampled.metrics | number, measured=measured)

    def _in_time(self) -> bool:
        """Returns whether the finished groups suffice to keep every group from becoming too old. Some of the
        groups started up to an iteration may not fit into later iterations within their age limit, and must
        be trained on now."""
        for begun in set(self._begun.values()):
            old = [place for place, when in self._begun.items() if when <= begun]
            later = (begun + self._staleness - self._iteration) * self._order.batch
            if sum(place in self._ready for place in old) < len(old) - later:
                return False
        return True

    def next_iteration(self) -> None:
        """Starts the prompts that are allowed after the end of an iteration."""
        self._iteration += 1
        self._background.run(self._begin())

    def stop(self) -> None:
        """Ends all work; the engines abort their requests."""

        async def end() -> None:
            working = list(self._working)
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

        self._background.run(end())

    def state(self) -> Collected:
        """Returns the collected groups and the open places, for a resume state."""

        async def now() -> Collected:
            still_open = sorted(self._begun.keys() - self._ready.keys())
            ready = dict(sorted(self._ready.items()))
            begun = {place: self._begun[place] for place in ready}
            dropped = dict(sorted(self._dropped.items()))
            rewards = {place: self._rewards[place] for place in (*ready, *dropped) if place in self._rewards}
            counted = tuple(sorted(self._counted))
            return Collected(
                self._next, still_open, begun, ready, dropped, rewards, counted, dict(self._looked_at)
            )

        return self._background.run(now())


def start_collector(
    engines: RolloutGroup,
    setup: Setup,
    iterations: int,
    first: int,
    updates: int,
    known: Collected,
    group_filter: GroupFilter | None = None,
) -> Collector:
    """Starts collecting answers for iteration `first` and all later iterations, after `updates` updates of
    the actor. `known` holds what a resume state has collected. `group_filter` is set with dynamic
    filtering."""
    assert engines.background is not None and engines.dispatch is not None
    return Collector(
        engines.background,
        partial(engines.answer, sampling=setup.sampling),
        setup.order,
        setup.config.max_staleness,
        iterations,
        first,
        updates,
        known,
        engines.dispatch.died,
        group_filter,
    )
