"""Starts scoring each answer with the teacher that its prompt's row names, and joins the log-probs in the
order of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_core.cluster.pending import Pending
from rlhf_core.cluster.worker_group import in_order
from rlhf_core.config import PPO
from rlhf_core.rewards.row_teachers import places_by_teacher
from rlhf_core.stages.ppo.rollout_records import Rollout


class PendingShares(NamedTuple):
    """Holds pending results of several groups (log-probs or TeacherTokens), each for the answers at its
    `places`. Works like `Pending`, but the nodes do not hold the data of all answers: `refs` is empty, and
    the driver sends the data to training."""

    shares: Sequence[tuple[Sequence[int], Pending[Any]]]
    refs: Sequence[Any] = ()

    def wait(self, timeout: float) -> list[Any]:
        """Waits for the groups. Returns their results with the indices of the answers."""
        return [list(zip(places, in_order(work.wait(timeout)), strict=True)) for places, work in self.shares]


def start_teachers(
    teachers: Mapping[str, Callable[[Sequence[Rollout]], Pending[Any]]], rollouts: Sequence[Rollout]
) -> PendingShares:
    """Starts scoring the rollouts. `teachers` maps a teacher's name to a function that starts scoring some
    rollouts; the reference has the name "". Teachers without rollouts are not called."""
    places = places_by_teacher(teachers, (rollout.prompt.row for rollout in rollouts))
    shares = [
        (places[name], start([rollouts[i] for i in places[name]]))
        for name, start in teachers.items()
        if name in places
    ]
    return PendingShares(shares)


def scorings_of(config: PPO, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns how many times each group scores an answer of an iteration, on average. The reference and the
    teachers score only their own answers. `rows` are the rows of the answers' prompts."""
    if not config.teachers:
        return config.scorings
    places = places_by_teacher(config.teachers, rows)
    shares = {name: len(places.get(name, ())) / len(rows) for name in ("", *config.teachers)}
    return config.scorings_by(shares)
