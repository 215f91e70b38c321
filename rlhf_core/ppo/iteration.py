"""One PPO iteration, as in the paper: sample, score, credit, optimise, publish weights."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from rlhf_core.data.documents import Document, Prompt
from rlhf_core.ppo.credit import Shaping, credit
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.ppo.roles import Update
from rlhf_core.ppo.types import Rollout
from rlhf_core.rollout.engine import Answer


class Sampled(NamedTuple):
    """How an iteration samples. `seeds` has one entry per prompt."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    n: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]


class Optimisation(NamedTuple):
    """How an iteration trains: batch size, passes over the rollout, learning rates of its optimiser steps (none: frozen)."""

    train_batch_size: int
    max_epochs: int
    critic_rates: Sequence[float]
    actor_rates: Sequence[float]
    shuffle_seed: str


class Iteration(NamedTuple):
    """Metrics of the iteration and the mean KL per token (nats) of its rollout."""

    metrics: dict[str, float]
    kl: float


def ppo_iteration(
    fleet: Fleet, sampled: Sampled, kl_coef: float, shaping: Shaping, optimisation: Optimisation, probe: Sequence[Document]
) -> Iteration:
    """Samples answers, scores them with four models, credits each token, trains critic and actor, and publishes the actor."""
    phases: dict[str, float] = {}
    with _phase(phases, "generate"):
        answers = fleet.sample(
            [prompt.tokens for prompt in sampled.prompts],
            sampled.seeds,
            sampled.n,
            sampled.temperature,
            sampled.max_new_tokens,
            sampled.stop_token_ids,
        )
        rollouts = [rollout(prompt, answer) for prompt, group in zip(sampled.prompts, answers, strict=True) for answer in group]
    with _phase(phases, "score"):
        scores = fleet.score(rollouts)
    with _phase(phases, "credit"):
        credited = credit(rollouts, scores, kl_coef, shaping)
    with _phase(phases, "train"):
        batches = minibatches(len(rollouts), optimisation)
        critic = [Update(batch, rate) for batch, rate in zip(batches, optimisation.critic_rates, strict=True)]
        actor = (
            [Update(batch, rate) for batch, rate in zip(batches, optimisation.actor_rates, strict=True)] if optimisation.actor_rates else []
        )
        steps = fleet.train(credited.experience, critic, actor)
    metrics = credited.metrics | {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    if actor:
        metrics["policy/first_ratio"] = steps[0]["policy/ratio"]
        with _phase(phases, "sync"):
            fleet.publish_weights()
        with _phase(phases, "probe"):
            metrics["sync/probe_gap"] = fleet.probe(probe)
    metrics["prompt/truncated"] = sum(prompt.truncated for prompt in sampled.prompts) / len(sampled.prompts)
    metrics["tokens"] = float(sum(len(r.document.tokens) for r in rollouts))
    return Iteration(metrics | {f"phase/{name}": seconds for name, seconds in phases.items()}, credited.kl)


def rollout(prompt: Prompt, answer: Answer) -> Rollout:
    """A prompt and its answer as one document; the mask marks the answer, its end-of-sequence token included."""
    document = Document(prompt.tokens + answer.tokens, [False] * len(prompt.tokens) + [True] * len(answer.tokens))
    return Rollout(document, np.array([0.0] * len(prompt.tokens) + answer.logprobs, dtype=np.float32), answer.finished)


def minibatches(count: int, optimisation: Optimisation) -> list[list[int]]:
    """Seeded shuffles of the rollout, one per epoch, cut into optimiser steps."""
    batches: list[list[int]] = []
    for epoch in range(optimisation.max_epochs):
        order = list(range(count))
        random.Random(f"{optimisation.shuffle_seed}-{epoch}").shuffle(order)
        batches += [order[i : i + optimisation.train_batch_size] for i in range(0, count, optimisation.train_batch_size)]
    return batches


@contextmanager
def _phase(phases: dict[str, float], name: str) -> Iterator[None]:
    """Wall seconds of a phase. Every phase ends with a wait for its workers' results, so no work leaks into the next."""
    start = time.monotonic()
    yield
    phases[name] = time.monotonic() - start
