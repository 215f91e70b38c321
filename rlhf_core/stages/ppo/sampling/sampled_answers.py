"""Samples an iteration's answers: the prompts in a seeded order, answered at once, ahead, or in parts.
`sample_in_turn.py` chooses among these ways, and filters.

Prompts form one endless sequence: each episode is a seeded shuffle, cut to whole batches, or a curriculum
draws them (`curriculum_draws.py`). An iteration takes the next batch.

With `max_staleness: 1` answers are sampled one iteration ahead: the engines generate them while the previous
iteration trains. The first iteration's answers come from the initial weights. After that, iteration k trains
on answers from the weights before update k - 1 (Noukhovitch et al. 2024, "Asynchronous RLHF",
arXiv:2410.18252). The clip is around the trainer's log-probs at the iteration's start, and the importance
weights cover the difference to the sampler's (Hilton et al. 2021, arXiv:2110.00641, the decoupled objective).
A resume state keeps these answers, since a resumed engine has newer weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, Term
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores, join_scores
from rlhf_core.stages.ppo.sampling.curriculum_draws import CurriculumDraws
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup, SeededPrompt
from rlhf_core.training.train_loop import order_of_epoch

T = TypeVar("T")


class ScoringModels(Protocol):
    """Defines what sampling and validation need from the models (`Fleet`): all scores, or only the rewards,
    also for a validation while the engines leave their GPUs to the models; and the text of tokens."""

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int
    ) -> Callable[[], Scores]: ...

    def start_reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Callable[[], Rewards]: ...

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def reward_while_asleep(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def decode(self, tokens: Sequence[int], skip: bool) -> str: ...


class PromptOrder(NamedTuple):
    """Defines the order of the prompts of a run. Position p is in episode p // (number of prompts in an
    episode's whole batches), unless a `curriculum` draws the prompts."""

    prompts: Sequence[Prompt]
    batch: int
    seed: int
    curriculum: CurriculumDraws | None = None

    def take(self, position: int, count: int) -> list[SeededPrompt]:
        """Returns `count` prompts from a position on, each with the sampler's seed, which depends on run,
        batch and prompt."""
        taken = []
        for place in range(position, position + count):
            index = self._index(place)
            taken.append(
                (
                    self.prompts[index],
                    random.Random(f"{self.seed}-{place // self.batch}-{index}").getrandbits(48),
                )
            )
        return taken

    def _index(self, place: int) -> int:
        if self.curriculum is not None:
            return self.curriculum.prompt_at(place)
        whole = len(self.prompts) // self.batch * self.batch
        episode, offset = divmod(place, whole)
        return order_of_epoch(len(self.prompts), episode, self.seed)[offset]


class Setup(NamedTuple):
    """Holds values that are fixed for all iterations of a run. `terms`: the sources of rewards; `probe`: the
    documents that check a weight sync; `allowed_failures`: the number of answers on which a reward source may
    fail in one iteration; `actor`: the path of the starting model."""

    config: PPO
    order: PromptOrder
    sampling: Sampling
    terms: Sequence[Term]
    probe: Sequence[Document]
    allowed_failures: int
    actor: str = ""


class MeasuredGroups(NamedTuple):
    """Holds the places of the groups whose rewards become known in an iteration, each group once in a run,
    and these rewards, n consecutive ones per group; None: the rewards of the answers that the iteration
    trains on."""

    places: Sequence[int]
    rewards: Rewards | None = None


class Sampled(NamedTuple):
    """Holds an iteration's rollouts, `n` consecutive ones per prompt; their rewards if filtering computed
    them; the next position; metrics.

    `age`: updates of the actor since the weights that sampled the answers. `scores` waits for scores in
    progress. `statistics`: the running statistics of rewards, including all answers that filtering looked at.
    `measured`: the answers from which a curriculum learns.
    """

    rollouts: list[Rollout]
    rewards: Rewards | None
    position: int
    metrics: dict[str, float]
    age: int = 0
    scores: Callable[[], Scores] | None = None
    statistics: dict[str, Running] | None = None
    measured: MeasuredGroups = MeasuredGroups(())


def start_sample(
    engines: RolloutGroup, setup: Setup, position: int, count: int | None = None
) -> Callable[[], Sampled]:
    """Starts to sample answers to `count` prompts (None: a batch) from a position on. Returns a function that
    waits for them."""
    taken = setup.order.take(position, setup.order.batch if count is None else count)
    rollouts = engines.start_rollouts(taken, setup.sampling)
    places = range(position, position + len(taken))
    return lambda: Sampled(rollouts(), None, places.stop, {}, measured=MeasuredGroups(places))


def stream(engines: RolloutGroup, models: ScoringModels, setup: Setup, position: int, part: int) -> Sampled:
    """Samples answers to a batch of prompts, and starts to score each `part` of them as soon as its last
    answer arrives."""
    batch = setup.order.batch
    rollouts, begun = stream_parts(
        engines,
        setup,
        position,
        batch,
        part,
        lambda whole: models.start_score(whole, None, setup.allowed_failures),
    )

    def scores() -> Scores:
        return join_scores([wait() for wait in begun], setup.allowed_failures)

    places = range(position, position + batch)
    return Sampled(rollouts, None, places.stop, {}, scores=scores, measured=MeasuredGroups(places))


def stream_parts(
    engines: RolloutGroup,
    setup: Setup,
    position: int,
    count: int,
    part: int,
    begin: Callable[[list[Rollout]], T],
) -> tuple[list[Rollout], list[T]]:
    """Samples answers to `count` prompts from a position on, and calls `begin` with the answers to each
    `part` of the prompts as soon as the last of these answers arrives. Returns all answers, and the results
    of `begin`, in the order of the prompts.

    Parts follow the order of prompts, not of arrival, so that each run scores the same answers together and
    gets bitwise the same scores.
    """
    taken = setup.order.take(position, count)
    groups: list[list[Rollout]] = [[] for _ in taken]
    begun: dict[int, T] = {}
    for index, answers in engines.stream_rollouts(taken, setup.sampling):
        groups[index] = answers
        start = index // part * part
        if all(groups[start : start + part]):
            begun[start] = begin([found for group in groups[start : start + part] for found in group])
    rollouts = [found for group in groups for found in group]
    return rollouts, [begun[start] for start in sorted(begun)]
