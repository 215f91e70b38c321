"""Samples an iteration's answers: the prompts in a seeded order, and with dynamic filtering only groups that have a signal.

Prompts form one endless sequence: each episode is a seeded shuffle, cut to whole batches. An iteration takes the next ones; with
filtering it goes on taking as many as are missing, across the end of an episode too, so that no accepted group is dropped or stale.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Term, plain_sum
from rlhf_core.rollout.engine import Answer, Sampling
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.records import Rollout, Scores
from rlhf_core.training.train_loop import order_of_epoch


class PromptOrder(NamedTuple):
    """Defines the order of the prompts of a run. Position p is in episode p // (prompts in the whole batches of an episode)."""

    prompts: Sequence[Prompt]
    batch: int
    seed: int

    def take(self, position: int, count: int) -> list[tuple[Prompt, int]]:
        """Returns `count` prompts from a position on, each with the sampler's seed: a function of run, batch and prompt."""
        whole = len(self.prompts) // self.batch * self.batch
        taken = []
        for place in range(position, position + count):
            episode, offset = divmod(place, whole)
            index = order_of_epoch(len(self.prompts), episode, self.seed)[offset]
            taken.append((self.prompts[index], random.Random(f"{self.seed}-{place // self.batch}-{index}").getrandbits(48)))
        return taken


class Filtering(NamedTuple):
    """Configures dynamic filtering (DAPO, Yu et al. 2025, eq. 11): replaces groups whose rewards differ by at most `min_spread`."""

    rounds: int
    min_spread: float
    terms: Sequence[Term]


class Sampled(NamedTuple):
    """Holds an iteration's rollouts, `n` of each prompt in a row; their rewards where filtering computed them; the next position; metrics.

    `age`: updates of the actor since the weights that answered. `scores` waits for scores that are under way.
    """

    rollouts: list[Rollout]
    rewards: Rewards | None
    position: int
    metrics: dict[str, float]
    age: int = 0
    scores: Callable[[], Scores] | None = None


def sample(
    fleet: Fleet,
    order: PromptOrder,
    position: int,
    sampling: Sampling,
    filtering: Filtering | None,
    allowed_failures: int,
    part: int | None = None,
) -> Sampled:
    """Samples answers to a batch of prompts. With filtering it takes as many rounds as are needed, at most `rounds`.

    `part`: prompts whose answers go to scoring while others are sampled (`stream`). Raises ValueError when no group has a signal.
    """
    if part is not None:
        return stream(fleet, order, position, sampling, part, allowed_failures)
    if filtering is None:
        return start_sample(fleet, order, position, sampling)()
    kept: list[Rollout] = []
    rewards: list[Rewards] = []
    computed: list[Rewards] = []
    start, rounds = position, 0
    while len(kept) < order.batch * sampling.n and rounds < filtering.rounds:
        missing = order.batch - len(kept) // sampling.n
        rollouts = start_sample(fleet, order, position, sampling, missing)().rollouts
        computed.append(fleet.reward(rollouts, allowed_failures))
        join(computed).check(allowed_failures)
        chosen = with_signal(plain_sum(computed[-1].by_source, filtering.terms), sampling.n, filtering.min_spread)
        kept += [rollouts[i] for i in chosen]
        rewards.append(computed[-1].take(chosen))
        position, rounds = position + missing, rounds + 1
    if not kept:
        raise ValueError(
            f"dynamic_filtering: none of the {position - start} groups of {rounds} rounds had answers of different reward: raise "
            f"temperature or n_samples_per_prompt, take other prompts, or turn it off"
        )
    accepted = len(kept) // sampling.n
    metrics = {"filter/rounds": float(rounds), "filter/accepted": accepted / (position - start), "filter/groups": float(accepted)}
    return Sampled(kept, join(rewards), position, metrics)


def start_sample(fleet: Fleet, order: PromptOrder, position: int, sampling: Sampling, count: int | None = None) -> Callable[[], Sampled]:
    """Starts to sample answers to `count` prompts (None: a batch) from a position on. Returns a function that waits for them."""
    taken = order.take(position, order.batch if count is None else count)
    answers = fleet.start_sample([prompt.tokens for prompt, _ in taken], [seed for _, seed in taken], sampling)

    def wait() -> Sampled:
        groups = zip(taken, answers(), strict=True)
        return Sampled([rollout(prompt, answer) for (prompt, _), group in groups for answer in group], None, position + len(taken), {})

    return wait


def stream(fleet: Fleet, order: PromptOrder, position: int, sampling: Sampling, part: int, allowed_failures: int) -> Sampled:
    """Samples answers to a batch of prompts, and starts to score each `part` of them as soon as its last answer is there.

    The parts are cut by the prompts' places, not by what arrives first, so that what is scored together, and with it every bit of the
    scores, is the same in each run.
    """
    taken = order.take(position, order.batch)
    groups: list[list[Rollout]] = [[] for _ in taken]
    begun: dict[int, Callable[[], Scores]] = {}
    for index, answers in fleet.stream([prompt.tokens for prompt, _ in taken], [seed for _, seed in taken], sampling):
        groups[index] = [rollout(taken[index][0], answer) for answer in answers]
        start = index // part * part
        if all(groups[start : start + part]):
            whole = [found for group in groups[start : start + part] for found in group]
            begun[start] = fleet.start_score(whole, None, allowed_failures)
    rollouts = [found for group in groups for found in group]

    def scores() -> Scores:
        return join_scores([begun[start]() for start in sorted(begun)], allowed_failures)

    return Sampled(rollouts, None, position + order.batch, {}, scores=scores)


def join_scores(parts: Sequence[Scores], allowed_failures: int) -> Scores:
    """Joins the scores of all parts, in order. Raises RewardsFailed when a source left more than `allowed_failures` without a reward."""
    rewards = join([part.rewards for part in parts])
    rewards.check(allowed_failures)
    logprobs, references, values = (
        [array for part in parts for array in getattr(part, name)] for name in ("logprobs", "ref_logprobs", "values")
    )
    return Scores(logprobs, references, values, rewards)


def with_signal(rewards: np.ndarray, n: int, min_spread: float) -> list[int]:
    """Returns the indices of answers, `n` of each prompt in a row, whose group's rewards (nan: none) differ by more than `min_spread`."""
    chosen: list[int] = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        given = group[~np.isnan(group)]
        if len(given) >= 2 and given.max() - given.min() > min_spread:
            chosen += range(start, start + n)
    return chosen


def rollout(prompt: Prompt, answer: Answer) -> Rollout:
    """Joins a prompt and its answer to one document; the mask marks the answer, its end-of-sequence token included."""
    mask = [False] * len(prompt.tokens) + [True] * len(answer.tokens)
    document = Document(prompt.tokens + answer.tokens, mask, experts=answer.experts)
    return Rollout(prompt, document, np.array([0.0] * len(prompt.tokens) + answer.logprobs, dtype=np.float32), answer.finished)
