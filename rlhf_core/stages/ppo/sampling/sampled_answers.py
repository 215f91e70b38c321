"""Samples an iteration's answers: the prompts in a seeded order, and with dynamic filtering only groups whose
rewards differ.

Prompts form one endless sequence: each episode is a seeded shuffle, cut to whole batches. An iteration takes
the next batch. With filtering it then takes more prompts, even past the end of an episode: as many as should
fill the batch, given the share accepted so far. Prompts after the last group that it needs go to the next
iteration, which answers them anew, so that no accepted group is stale.

With `max_staleness: 1` answers are sampled one iteration ahead: the engines generate them while the previous
iteration trains. The first iteration's answers come from the initial weights. After that, iteration k trains
on answers from the weights before update k - 1 (Noukhovitch et al. 2024, "Asynchronous RLHF",
arXiv:2410.18252). The clip is around the trainer's log-probs at the iteration's start, and the importance
weights cover the difference to the sampler's (Hilton et al. 2021, arXiv:2110.00641, the decoupled objective).
A resume state keeps these answers, since a resumed engine has newer weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Running, Term, combine, with_answers
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.stages.ppo.rewards.shaped_rewards import shaped_rewards
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores, join_scores
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup, SeededPrompt
from rlhf_core.training.train_loop import order_of_epoch

MORE = 1.2
MOST = 4  # prompts of a further round of filtering: MORE times the expected need, at most MOST batches


class ScoringModels(Protocol):
    """Defines what sampling and validation need of the models (`Fleet`): scores or the rewards alone, for a
    validation while the engines leave the models their GPUs; and the text of tokens."""

    def start_score(
        self, rollouts: Sequence[Rollout], rewards: Rewards | None, allowed_failures: int
    ) -> Callable[[], Scores]: ...

    def reward(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def reward_while_asleep(self, rollouts: Sequence[Rollout], allowed_failures: int) -> Rewards: ...

    def decode(self, tokens: Sequence[int], skip: bool) -> str: ...


class PromptOrder(NamedTuple):
    """Defines the order of the prompts of a run. Position p is in episode p // (number of prompts in an
    episode's whole batches)."""

    prompts: Sequence[Prompt]
    batch: int
    seed: int

    def take(self, position: int, count: int) -> list[SeededPrompt]:
        """Returns `count` prompts from a position on, each with the sampler's seed, which depends on run,
        batch and prompt."""
        whole = len(self.prompts) // self.batch * self.batch
        taken = []
        for place in range(position, position + count):
            episode, offset = divmod(place, whole)
            index = order_of_epoch(len(self.prompts), episode, self.seed)[offset]
            taken.append(
                (
                    self.prompts[index],
                    random.Random(f"{self.seed}-{place // self.batch}-{index}").getrandbits(48),
                )
            )
        return taken


class Setup(NamedTuple):
    """Holds values that are fixed for all iterations of a run. `terms`: the sources of rewards; `probe`: the
    documents that check a weight sync; `allowed_failures`: the number of answers on which a reward source may
    fail in one iteration."""

    config: PPO
    order: PromptOrder
    sampling: Sampling
    terms: Sequence[Term]
    probe: Sequence[Document]
    allowed_failures: int


class Sampled(NamedTuple):
    """Holds an iteration's rollouts, `n` consecutive ones per prompt; their rewards if filtering computed
    them; the next position; metrics.

    `age`: updates of the actor since the weights that sampled the answers. `scores` waits for scores in
    progress. `statistics`: the running statistics of rewards, including all answers that filtering looked at.
    """

    rollouts: list[Rollout]
    rewards: Rewards | None
    position: int
    metrics: dict[str, float]
    age: int = 0
    scores: Callable[[], Scores] | None = None
    statistics: dict[str, Running] | None = None


def sample(
    engines: RolloutGroup,
    models: ScoringModels,
    setup: Setup,
    position: int,
    statistics: Mapping[str, Running],
) -> Sampled:
    """Samples answers to a batch of prompts, with `stream` or `sample_filtered` if the recipe asks for it."""
    if setup.config.stream_batch_size is not None:
        return stream(engines, models, setup, position, setup.config.stream_batch_size)
    if setup.config.dynamic_filtering:
        return sample_filtered(engines, models, setup, position, statistics)
    return start_sample(engines, setup, position)()


def sample_filtered(
    engines: RolloutGroup,
    models: ScoringModels,
    setup: Setup,
    position: int,
    statistics: Mapping[str, Running],
) -> Sampled:
    """Samples until a batch of prompts has answers whose rewards differ (DAPO, Yu et al. 2025, eq. 11), in at
    most `max_filter_rounds` rounds.

    Rewards are compared in the form used for training: standardised, clipped, with penalties. Metrics
    `reward/*` cover all answers, so that a curve does not depend on which groups were kept. Raises ValueError
    when no group has a signal.
    """
    config = setup.config
    n = setup.sampling.n
    batch = setup.order.batch
    updated = dict(statistics)
    kept: list[Rollout] = []
    kept_rewards: list[Rewards] = []
    seen: list[Rollout] = []
    seen_rewards: list[Rewards] = []
    accepted = 0
    rounds = 0
    while len(kept) < batch * n and rounds < config.max_filter_rounds:
        missing = batch - len(kept) // n
        asked = len(seen) // n
        count = min(math.ceil(MORE * missing / max(accepted / asked, 0.1)), MOST * batch) if asked else batch
        rollouts = start_sample(engines, setup, position, count)().rollouts
        rewards = models.reward(rollouts, setup.allowed_failures)
        seen += rollouts
        seen_rewards.append(rewards)
        join(seen_rewards).check(setup.allowed_failures * len(seen) // (batch * n))
        updated = with_answers(updated, rewards.by_source, setup.terms)
        trainable = np.array([rollout.finished or not config.mask_truncated for rollout in rollouts])
        found = with_signal(
            trained_rewards(rollouts, rewards, updated, setup), n, config.filter_min_spread, trainable
        )
        chosen = found[: missing * n]
        kept += [rollouts[i] for i in chosen]
        kept_rewards.append(rewards.take(chosen))
        accepted += len(found) // n
        rounds += 1
        position += count if len(kept) < batch * n else chosen[-1] // n + 1
    asked = len(seen) // n
    if not kept:
        raise ValueError(
            f"dynamic_filtering: none of the {asked} groups of {rounds} rounds had answers of different"
            " reward: raise temperature or n_samples_per_prompt, take other prompts, or turn it off"
        )
    everything = combine(join(seen_rewards).by_source, setup.terms, updated, n)
    of_kept = combine(join(kept_rewards).by_source, setup.terms, updated, n).metrics
    metrics = everything.metrics | shaped_rewards(seen, everything, config).metrics
    metrics |= {f"filter/reward_{name}": of_kept[f"reward/{name}"] for name in ("mean", "std")}
    metrics |= {
        "filter/rounds": float(rounds),
        "filter/accepted": accepted / asked,
        "filter/groups": len(kept) / n,
    }
    return Sampled(kept, join(kept_rewards), position, metrics, statistics=updated)


def trained_rewards(
    rollouts: Sequence[Rollout], rewards: Rewards, statistics: Mapping[str, Running], setup: Setup
) -> np.ndarray:
    """Returns the rewards from which advantages are computed, (N,), nan for an answer without one."""
    if not np.isfinite(list(rewards.by_source.values())).all(0).any():
        return np.full(len(rollouts), np.nan)
    combined = combine(rewards.by_source, setup.terms, statistics, setup.sampling.n)
    shaped = shaped_rewards(rollouts, combined, setup.config)
    return np.where(combined.scored.numpy(), shaped.rewards.numpy(), np.nan)


def start_sample(
    engines: RolloutGroup, setup: Setup, position: int, count: int | None = None
) -> Callable[[], Sampled]:
    """Starts to sample answers to `count` prompts (None: a batch) from a position on. Returns a function that
    waits for them."""
    taken = setup.order.take(position, setup.order.batch if count is None else count)
    rollouts = engines.start_rollouts(taken, setup.sampling)
    return lambda: Sampled(rollouts(), None, position + len(taken), {})


def stream(engines: RolloutGroup, models: ScoringModels, setup: Setup, position: int, part: int) -> Sampled:
    """Samples answers to a batch of prompts, and starts to score each `part` of them as soon as its last
    answer arrives.

    Parts follow the order of prompts, not of arrival, so that each run scores the same answers together and
    gets bitwise the same scores.
    """
    taken = setup.order.take(position, setup.order.batch)
    groups: list[list[Rollout]] = [[] for _ in taken]
    begun: dict[int, Callable[[], Scores]] = {}
    for index, answers in engines.stream_rollouts(taken, setup.sampling):
        groups[index] = answers
        start = index // part * part
        if all(groups[start : start + part]):
            whole = [found for group in groups[start : start + part] for found in group]
            begun[start] = models.start_score(whole, None, setup.allowed_failures)
    rollouts = [found for group in groups for found in group]

    def scores() -> Scores:
        return join_scores([begun[start]() for start in sorted(begun)], setup.allowed_failures)

    return Sampled(rollouts, None, position + setup.order.batch, {}, scores=scores)


def with_signal(
    rewards: np.ndarray, n: int, min_spread: float, trainable: np.ndarray | None = None
) -> list[int]:
    """Returns the indices of answers (`n` consecutive ones per prompt) whose group's rewards (nan: none)
    differ by more than `min_spread`, if at least one answer of the group is `trainable` (None: all are)."""
    chosen: list[int] = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        given = group[~np.isnan(group)]
        if trainable is not None and not trainable[start : start + n].any():
            continue
        if len(given) >= 2 and given.max() - given.min() > min_spread:
            chosen += range(start, start + n)
    return chosen
