"""Decides, while the models train, which groups of answers have a signal (see `group_signal.py`), as the
collector receives them.

Only one request for rewards is open at a time; groups that finish in the meantime share the next one. Reward
sources thus keep to their limits, and a reward model gets full passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Running, with_answers
from rlhf_core.rollout.dispatch import in_daemon
from rlhf_core.stages.ppo.rollout_records import Rollout
from rlhf_core.stages.ppo.sampling.group_signal import (
    Looked,
    allowed_of,
    answers_with_signal,
    check_failed,
    kept_metrics,
    looked_metrics,
    most_batches,
    no_signal,
    rounds_of,
)
from rlhf_core.stages.ppo.sampling.sampled_answers import Sampled, ScoringModels, Setup


class FoundGroup(NamedTuple):
    """Holds all answers to one prompt, with their rewards, and whether they have a signal."""

    rollouts: Sequence[Rollout]
    rewards: Rewards
    kept: bool


class GroupVerdict(NamedTuple):
    """Holds the rewards of a group, and whether it has a signal."""

    rewards: Rewards
    signal: bool


class GroupFilter:
    """Filters the groups of a run. `statistics` are the running statistics of rewards over all iterations so
    far.

    Each group's rewards are standardised with these statistics and the answers of its own request. The next
    iteration that takes groups adds the answers to the statistics, so each answer counts once, even after a
    resume.
    """

    def __init__(self, models: ScoringModels, setup: Setup, statistics: Mapping[str, Running]):
        self._models = models
        self._setup = setup
        self._statistics = statistics
        self._waiting: list[tuple[list[Rollout], asyncio.Future[GroupVerdict]]] = []
        self._working: asyncio.Task[None] | None = None
        self._failed: Exception | None = None

    @property
    def limit(self) -> int:
        """Returns how many groups may be examined for an iteration: the same number as when sampling in turn
        (see `sample_in_turn.py`)."""
        return most_batches(self._setup.config.max_filter_rounds) * self._setup.order.batch

    async def look_at(self, rollouts: list[Rollout]) -> GroupVerdict:
        """Returns the rewards of a group and whether it has a signal. Raises any error of a reward source,
        for the group concerned and for all groups after it; the sources then receive no more requests."""
        if self._failed is not None:
            raise self._failed
        verdict = asyncio.get_running_loop().create_future()
        self._waiting.append((rollouts, verdict))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await verdict

    async def _work(self) -> None:
        """Requests rewards as long as groups wait for them."""
        while self._waiting:
            groups = [(rollouts, future) for rollouts, future in self._waiting if not future.done()]
            self._waiting = []
            if not groups:  # no caller waits for them any more
                continue
            try:
                verdicts = await self._verdicts([rollouts for rollouts, _ in groups])
            except Exception as error:
                self._failed = error
                for _, future in (*groups, *self._waiting):
                    if not future.done():
                        future.set_exception(error)
                self._waiting = []
                return
            for (_, future), verdict in zip(groups, verdicts, strict=True):
                if not future.done():
                    future.set_result(verdict)

    async def _verdicts(self, groups: Sequence[list[Rollout]]) -> list[GroupVerdict]:
        setup = self._setup
        n = setup.sampling.n
        rollouts = [rollout for group in groups for rollout in group]
        allowed = allowed_of(len(rollouts), setup)
        rewards = await in_daemon(partial(self._models.reward, rollouts, allowed), "rewards")
        statistics = with_answers(self._statistics, rewards.by_source, setup.terms)
        chosen = set(answers_with_signal(rollouts, rewards, statistics, setup))
        starts = range(0, len(rollouts), n)
        return [GroupVerdict(rewards.take(range(start, start + n)), start in chosen) for start in starts]

    def check(self, groups: Sequence[Rewards]) -> None:
        """Raises RewardsFailed if sources failed on these groups more often than the recipe allows."""
        check_failed(join(groups), self._setup)

    def sampled(self, kept: Sequence[FoundGroup], looked_at: Sequence[FoundGroup], position: int) -> Sampled:
        """Returns the answers of the groups `kept`, and the metrics of the groups that were `looked_at` since
        the last iteration. Each group counts once, when its rewards are known, not when it is trained on.
        Leaves out these metrics if there are no such groups. Raises RewardsFailed if sources failed more
        often than the recipe allows, and ValueError if no group is kept."""
        setup = self._setup
        metrics: dict[str, float] = {}
        # groups that were still open at the limit have been examined too
        rounds = min(rounds_of(len(looked_at) / setup.order.batch), setup.config.max_filter_rounds)
        if looked_at:
            rewards = join([group.rewards for group in looked_at])
            check_failed(rewards, setup)
            self._statistics = with_answers(self._statistics, rewards.by_source, setup.terms)
            answers = [rollout for group in looked_at for rollout in group.rollouts]
            accepted = sum(group.kept for group in looked_at)
            metrics = looked_metrics(Looked(answers, rewards, accepted, rounds), self._statistics, setup)
        if not kept:
            raise ValueError(no_signal(len(looked_at), rounds))
        of_kept = join([group.rewards for group in kept])
        metrics |= kept_metrics(of_kept, self._statistics, setup)
        rollouts = [rollout for group in kept for rollout in group.rollouts]
        return Sampled(rollouts, of_kept, position, metrics, statistics=dict(self._statistics))
