"""Requests the rewards of an iteration's answers from all sources: reward models, functions, servers, judges,
the environment, and sources without rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.cluster.worker_group import Turns, WorkerGroup, in_order, put_on_nodes
from rlhf_core.config import PPO
from rlhf_core.config.rewards import EnvironmentReward, NoReward
from rlhf_core.rewards.clients import Clients, Rewards, collect
from rlhf_core.rewards.own_tokens import OwnTokens
from rlhf_core.stages.ppo.rewards.texts import Decode, samples, with_own_ends
from rlhf_core.stages.ppo.roles.read_only import Reward
from rlhf_core.stages.ppo.rollout_records import Rollout


@dataclass(frozen=True)
class RewardSources:
    """Holds the sources of `config.reward`. `models` maps titles to the groups of reward models. `own_tokens`
    re-tokenises answers for reward models with another tokenizer. `clients` are functions, servers and
    judges. `decode` turns the token ids of several texts into text."""

    config: PPO
    models: Mapping[str, WorkerGroup]
    own_tokens: Mapping[str, OwnTokens]
    clients: Clients
    decode: Decode

    def start(
        self, rollouts: Sequence[Rollout], documents: Any, allowed: int, scoring: Turns
    ) -> Callable[[], Rewards]:
        """Starts all sources. `documents` are the rollouts' documents, already on the nodes. Returns a
        function that waits for the rewards, and raises RewardsFailed if a source leaves more than `allowed`
        answers without a reward."""
        texts = self._texts(rollouts)
        ended = with_own_ends(texts, rollouts) if self.own_tokens else []
        given = {title: put_on_nodes(writer.documents(ended)) for title, writer in self.own_tokens.items()}
        models = {
            title: scoring.start(group, "score", Reward.scores, given.get(title, documents))
            for title, group in self.models.items()
        }
        requested = self.clients.start(texts, allowed) if self.clients else {}

        def wait() -> Rewards:
            scored = {
                title: np.concatenate(in_order(pending.wait(self.config.timeout)))
                for title, pending in models.items()
            }
            scored |= self._known(rollouts)
            failure = next(filter(None, map(failure_of, rollouts)), "")
            found = collect(scored.items(), requested, allowed, {self._environment or "": failure})
            return without_failed(found, rollouts, failure, allowed) if failure else found

        return wait

    @property
    def _environment(self) -> str | None:
        """Returns the title of the source that is the environment, or None if there is no such source."""
        titles = (source.title for source in self.config.reward if isinstance(source, EnvironmentReward))
        return next(titles, None)

    def _texts(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Returns the texts that functions, servers and other tokenizers read; empty if nothing reads
        texts."""
        wanted = self.clients.wanted | ({"responses"} if self.own_tokens else set())
        return samples(rollouts, self.decode, wanted) if self.clients or self.own_tokens else []

    def _known(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Returns the rewards that need no request: the rewards of the environment's episodes, and zeros."""
        found = {}
        for source in self.config.reward:
            if isinstance(source, EnvironmentReward):
                own = [rollout.own.reward for rollout in rollouts if rollout.own is not None]
                found[source.title] = np.array(own)
            elif isinstance(source, NoReward):
                found[source.title] = np.zeros(len(rollouts))
        return found


def failure_of(rollout: Rollout) -> str:
    """Returns why a rollout's episode failed; "" if it did not."""
    return "" if rollout.own is None else rollout.own.failure


def without_failed(rewards: Rewards, rollouts: Sequence[Rollout], failure: str, allowed: int) -> Rewards:
    """Removes the rewards of failed episodes, even rewards that a source could compute. Raises RewardsFailed
    if this leaves more than `allowed` answers without a reward."""
    lost = np.array([bool(failure_of(rollout)) for rollout in rollouts])
    kept = {title: np.where(lost, np.nan, values) for title, values in rewards.by_source.items()}
    found = Rewards(
        kept, {title: f"an episode failed: {failure}" for title in kept} | rewards.errors, rewards.steps
    )
    found.check(allowed)
    return found
