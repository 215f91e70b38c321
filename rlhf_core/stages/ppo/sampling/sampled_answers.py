"""Samples an iteration's answers to prompts in a seeded order: all at once, ahead, or in parts.
`sample_in_turn.py` chooses between these modes, and filters.

Prompts form one endless sequence. Each episode is a seeded shuffle, cut to whole batches, or a curriculum
draws the prompts (see `curriculum_draws.py`). An iteration takes the next batch.

With `max_staleness: 1`, answers are sampled one iteration ahead: the engines generate them while the previous
iteration trains. The first iteration's answers come from the initial weights. After that, iteration k trains
on answers from the weights before update k - 1 (Noukhovitch et al. 2024, "Asynchronous RLHF",
arXiv:2410.18252). The clip is relative to the trainer's log-probs at the start of the iteration. Importance
weights correct for the difference to the sampler's log-probs (Hilton et al. 2021, arXiv:2110.00641, the
decoupled objective). A resume state keeps these answers, because a resumed engine has newer weights.
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
    """Defines the methods of `Fleet` that sampling and validation call. They return all scores, only the
    rewards, or the rewards of a validation while the engines sleep, and decode tokens."""

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int
    ) -> Callable[[], Scores]: ...

    def start_reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Callable[[], Rewards]: ...

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def reward_while_asleep(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def decode(self, tokens: Sequence[int], skip: bool) -> str: ...


class PromptOrder(NamedTuple):
    """Defines the prompt order of a run. Position p is in episode p // (number of prompts in an episode's
    whole batches), unless a `curriculum` draws the prompts."""

    prompts: Sequence[Prompt]
    batch: int
    seed: int
    curriculum: CurriculumDraws | None = None

    def take(self, position: int, count: int) -> list[SeededPrompt]:
        """Returns `count` prompts, starting at a position, each with the sampler's seed. The seed depends on
        the run, the batch and the prompt."""
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
    """Holds values that are fixed for all iterations of a run. `terms` are the reward sources. `probe` holds
    the documents that check a weight sync. `allowed_failures` is the number of answers on which a reward
    source may fail in one iteration. `actor` is the path of the starting model."""

    config: PPO
    order: PromptOrder
    sampling: Sampling
    terms: Sequence[Term]
    probe: Sequence[Document]
    allowed_failures: int
    actor: str = ""


class MeasuredGroups(NamedTuple):
    """Holds the places of the groups whose rewards become known in an iteration; each group appears once in a
    run. Also holds these rewards, n consecutive rewards per group. None stands for the rewards of the answers
    that the iteration trains on."""

    places: Sequence[int]
    rewards: Rewards | None = None


class Sampled(NamedTuple):
    """Holds an iteration's rollouts, with `n` consecutive rollouts per prompt; their rewards, if filtering
    computed them; the next position; and metrics.

    `age` is the number of actor updates since the weights that sampled the answers. `scores` waits for scores
    in progress. `statistics` are the running statistics of rewards, including all answers that filtering
    examined. `measured` holds the answers from which a curriculum learns.
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
    """Starts sampling answers to `count` prompts (None: a batch), starting at a position. Returns a function
    that waits for them."""
    taken = setup.order.take(position, setup.order.batch if count is None else count)
    rollouts = engines.start_rollouts(taken, setup.sampling)
    places = range(position, position + len(taken))
    return lambda: Sampled(rollouts(), None, places.stop, {}, measured=MeasuredGroups(places))


def stream(engines: RolloutGroup, models: ScoringModels, setup: Setup, position: int, part: int) -> Sampled:
    """Samples answers to a batch of prompts, and starts scoring each `part` of them as soon as its last
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
    """Samples answers to `count` prompts, starting at a position. Calls `begin` with the answers to each
    `part` of the prompts as soon as the last of these answers arrives. Returns all answers and the results of
    `begin`, in prompt order.

    Parts follow the order of prompts, not of arrival. Each run thus scores the same answers together and gets
    bitwise identical scores.
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
