"""Keeps the engines busy while the models train: begins prompts in their order, and collects answers as they
finish.

With `max_staleness` k an iteration trains on answers begun at most k iterations earlier. At most (iteration +
k + 1) batches are begun by then (Fu et al. 2025, "AReaL", eq. 3), and an iteration waits for answers that
would become too old. So a long answer may continue over up to k updates, and each of its tokens knows the
weights that sampled it. With fast engines, fewer batches are begun: answers should not be older than is
needed to keep the models from waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_core.data.documents import Prompt
from rlhf_core.rollout.dispatch import Background
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Sampled

AnswerPrompt = Callable[[Prompt, int], Awaitable[list[Rollout]]]


class Collected(NamedTuple):
    """The state of a collector between two iterations: the next place in the order to begin, places being
    answered, and by place all answers to the prompts that are `ready`, with the iterations that `begun`
    them."""

    next: int = 0
    open: Sequence[int] = ()
    begun: Mapping[int, int] = {}
    ready: Mapping[int, list[Rollout]] = {}


class Collector:
    """Collects groups for a run of `iterations` iterations, from `iteration` on. `answer` answers a prompt
    with its seed.

    `updates`: number of the actor's updates so far, the version of the weights. `died`: set while an engine
    is dead.
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
    ):
        self._background = background
        self._answer = answer
        self._order = order
        self._staleness = staleness
        self._places = iterations * order.batch
        self._iteration = iteration
        self.updates = updates
        self._lead = 1  # batches begun beyond the iteration's own
        self._next = known.next
        self._ready = dict(known.ready)
        self._begun = dict(known.begun)
        self._working = set[asyncio.Task[None]]()
        self._failed: BaseException | None = None
        self._arrived = asyncio.Event()
        self._died = died or asyncio.Event()
        background.run(self._begin(known.open))

    async def _begin(self, again: Sequence[int] = ()) -> None:
        """Begins the prompts at the places `again`, and all new ones allowed at this point."""
        most = min((self._iteration + self._lead + 1) * self._order.batch, self._places)
        new = range(self._next, max(most, self._next))
        self._next = new.stop
        for place in [*again, *new]:
            ((prompt, seed),) = self._order.take(place, 1)
            self._begun[place] = self._iteration
            task = asyncio.create_task(self._collect(place, prompt, seed))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _collect(self, place: int, prompt: Prompt, seed: int) -> None:
        try:
            self._ready[place] = await self._answer(prompt, seed)
        except Exception as error:
            self._failed = error
        self._arrived.set()

    def take(self) -> Sampled | None:
        """Waits for an iteration's groups and returns finished ones, in the order of the prompts. Returns
        None when an engine has died, since it may be the only one. Raises RoleFailed when engines fail
        otherwise."""
        return self._background.run(self._take())

    async def _take(self) -> Sampled | None:
        waiting = float(len(self._ready))
        waited = False
        while True:
            if self._failed is not None:
                raise self._failed
            if self._died.is_set():
                return None
            if len(self._ready) >= self._order.batch and self._in_time():
                break
            waited = True
            self._arrived.clear()
            arrived = asyncio.create_task(self._arrived.wait())
            died = asyncio.create_task(self._died.wait())
            _, others = await asyncio.wait((arrived, died), return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        chosen = sorted(self._ready)[: self._order.batch]
        rollouts = [found for place in chosen for found in self._ready.pop(place)]
        for place in chosen:
            del self._begun[place]
        if waited:
            self._lead = min(self._lead + 1, self._staleness)
        elif len(self._ready) >= self._order.batch:
            self._lead = max(self._lead - 1, 1)
        ages = np.concatenate(
            [np.zeros(0), *(found.ages(self.updates) for found in rollouts if found.versions)]
        )
        # empty if all episodes failed at once
        mean, most = (float(ages.mean()), float(ages.max())) if len(ages) else (0.0, 0.0)
        metrics = {"rollout/age": mean, "rollout/age_max": most, "rollout/waiting": waiting}
        return Sampled(rollouts, None, self._next, metrics | {"rollout/lead": float(self._lead)})

    def _in_time(self) -> bool:
        """Returns whether the finished groups suffice to keep every group from becoming too old. Of the
        groups begun up to an iteration, those that exceed the capacity of the iterations up to their last one
        must be trained on now."""
        for begun in set(self._begun.values()):
            old = [place for place, when in self._begun.items() if when <= begun]
            later = (begun + self._staleness - self._iteration) * self._order.batch
            if sum(place in self._ready for place in old) < len(old) - later:
                return False
        return True

    def next_iteration(self) -> None:
        """Begins the prompts that are allowed after the end of an iteration."""
        self._iteration += 1
        self._background.run(self._begin())

    def stop(self) -> None:
        """Ends all work: engines abort their requests."""

        async def end() -> None:
            working = list(self._working)
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

        self._background.run(end())

    def state(self) -> Collected:
        """Returns the collected groups and open places, for a resume state."""

        async def now() -> Collected:
            still_open = sorted(self._begun.keys() - self._ready.keys())
            ready = dict(sorted(self._ready.items()))
            return Collected(self._next, still_open, {place: self._begun[place] for place in ready}, ready)

        return self._background.run(now())
