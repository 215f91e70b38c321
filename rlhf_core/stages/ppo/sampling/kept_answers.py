"""Replaces the engines in a run that trains only on kept rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_core.cluster.worker_group import WorkerGroup
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.sampled_answers import Sampled, Setup
from rlhf_core.stages.ppo.sampling.stored import read_kept


@dataclass(frozen=True)
class KeptAnswers(RolloutGroup):
    """Supplies the answers that an earlier run kept in `folder`. `sampler` is the actor's group and is not
    called."""

    folder: Path = Path()

    @property
    def engine_groups(self) -> tuple[WorkerGroup, ...]:
        return ()

    def take(self, iteration: int, setup: Setup) -> Sampled:
        """Returns the answers of an iteration, counted from 0, with their rewards. Their position belongs to
        the next iteration."""
        return read_kept(self.folder, iteration + 1, setup)

    def sync_weights(self, version: int = 0) -> None:
        """Does nothing: no engine uses the weights."""

    def draft_metrics(self) -> dict[str, float]:
        return {}
