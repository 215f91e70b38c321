"""Runs one PPO iteration: samples, scores, assigns credit, optimises, and sends the weights to vLLM.
`iteration_loop.py` contains the loop."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np

from rlhf_core.config import PPO
from rlhf_core.environments.row_environments import ENVIRONMENT
from rlhf_core.environments.trajectories.trajectory import Limit
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, plain_sum, with_answers
from rlhf_core.rewards.named_rows import environment_metrics, task_metrics
from rlhf_core.runs.timeline import Timeline
from rlhf_core.stages.ppo.fleet import Fleet
from rlhf_core.stages.ppo.measured.phase_clock import PhaseClock, timeline_of
from rlhf_core.stages.ppo.rewards.credit import Credited, Divergence, credit, distance_to_sampler, divergence
from rlhf_core.stages.ppo.roles.role_passes import Scored
from rlhf_core.stages.ppo.roles.trained import Steps, Update
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores
from rlhf_core.stages.ppo.sampling.collector import Collector
from rlhf_core.stages.ppo.sampling.kept_answers import KeptAnswers
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.sample_in_turn import sample
from rlhf_core.stages.ppo.sampling.sampled_answers import MeasuredGroups, Sampled, Setup, start_sample
from rlhf_core.stages.ppo.token_records import TokenRecord, token_records


class IterationSchedule(NamedTuple):
    """Holds the training schedule of one iteration: optimiser steps per pass over the rollout, number of
    passes, and each role's learning rates.

    Roles that do not exist, or do not train in this iteration, have no entry in `rates`.
    """

    steps_per_epoch: int
    max_epochs: int
    rates: Mapping[str, Sequence[float]]
    shuffle_seed: str


class Carried(NamedTuple):
    """Holds the state that one iteration passes to the next: the position in the prompt order, the running
    statistics of rewards, and the next answers if they were sampled ahead."""

    position: int
    statistics: Mapping[str, Running]
    ahead: Sampled | None = None


class Iteration(NamedTuple):
    """Holds the results of an iteration: metrics, the mean KL per token of its rollouts (nats), the state for
    the next iteration, its rollouts with their rewards, its timeline, and records of some rollouts by
    index."""

    metrics: dict[str, float]
    kl: float
    carried: Carried
    rollouts: Sequence[Rollout]
    rewards: Rewards
    timeline: Timeline
    records: Mapping[int, TokenRecord]


def ppo_iteration(
    fleet: Fleet,
    setup: Setup,
    carried: Carried,
    kl_coef: float,
    schedule: IterationSchedule,
    last: bool = False,
    collector: Collector | None = None,
) -> Iteration:
    """Samples answers (or takes them from the collector), and scores them with all models and reward sources.
    Then assigns credit to each token, trains, and sends the actor's weights to the engines.

    `last` means that no iteration follows, so no answers are sampled ahead.
    """
    config = setup.config
    engines = fleet.engines
    clock = PhaseClock()
    with clock.phase("generate"):
        sampled = sampled_of(fleet, setup, carried, collector)
        rollouts = sampled.rollouts
    ahead_of_training = config.one_ahead and config.has_engines and not last
    pending = start_sample(engines, setup, sampled.position) if ahead_of_training else None
    if fleet.sleeps:
        with clock.phase("sleep"):
            engines.sleep(keep_weights="actor" not in schedule.rates)
    with clock.phase("score"):
        scores = (sampled.scores or fleet.start_score(rollouts, sampled.rewards, setup.allowed_failures))()
    with clock.phase("credit"):
        statistics = sampled.statistics
        if statistics is None:
            statistics = with_answers(carried.statistics, scores.rewards.by_source, setup.terms)
        credited = credit(rollouts, scores, kl_coef, statistics, config, setup.terms, fleet.lengths)
        of_curriculum = measure_pass_rates(setup, sampled.measured, scores.rewards)
    version = collector.updates if collector else None  # version of the weights that now train
    measured: list[Divergence] = []

    def measure() -> None:
        if scores.logprobs:
            measured.append(
                divergence(rollouts, scores.logprobs, scores.ref_logprobs, credited.usable, kl_coef, config)
            )

    with clock.phase("train"):
        updates = updates_of(credited, schedule, kl_coef)
        if updates:
            steps, logprobs = fleet.train(credited.experience, updates, measure, scores.stored)
        else:  # `rollouts_only`: nothing is trained
            measure()
            steps, logprobs = Steps([], [])
    diverged = measured[0] if measured else divergence_of(rollouts, scores, logprobs, kl_coef, config)
    if fleet.sleeps:
        with clock.phase("wake"):
            fleet.wake_engines()
    metrics = credited.metrics | diverged.metrics | sampled.metrics | of_curriculum | step_means(steps)
    if config.sampler_is == "in_ratio":
        metrics |= distance_to_sampler(rollouts, logprobs, config)
    if config.one_ahead:
        metrics["rollout/age"] = float(sampled.age)
    ahead = None
    if pending is not None:  # before the weights change
        with clock.phase("generate"):
            ahead = pending()._replace(age=int("actor" in updates))
    if "actor" in updates:
        metrics |= actor_metrics(steps, config)
    if "actor" in updates and config.has_engines:
        with clock.phase("sync"):
            if collector:
                collector.updates += 1
            engines.sync_weights(collector.updates if collector else 0)
        with clock.phase("probe"):
            metrics["sync/probe_gap"], metrics["sync/probe_bound"] = fleet.probe(setup.probe)
    if collector:
        collector.next_iteration()
    metrics |= episode_metrics(rollouts) | size_metrics(rollouts)
    metrics |= metrics_by_name(rollouts, scores.rewards, config)
    metrics |= {f"phase/{name}": seconds for name, seconds in clock.seconds().items()}
    work = fleet.take_work()
    timeline = timeline_of(clock, work, fleet.gpus)
    metrics |= fleet.iteration_metrics(
        rollouts, training_passes(updates, steps, schedule.max_epochs), timeline.seconds, work
    )
    carried = Carried(sampled.position, statistics, ahead)
    age = sampled.age if config.has_engines else None
    records = token_records(rollouts, scores, credited, logprobs, config, age, version)
    return Iteration(metrics, diverged.kl, carried, rollouts, scores.rewards, timeline, records)


def measure_pass_rates(setup: Setup, measured: MeasuredGroups, trained: Rewards) -> dict[str, float]:
    """Passes the rewards of the groups that are `measured` to the curriculum, if a curriculum draws the
    prompts. `trained` holds the rewards of the answers that the iteration trains on. Returns the curriculum's
    metrics."""
    curriculum = setup.order.curriculum
    if curriculum is None or not setup.config.has_engines:
        return {}
    if measured.places:
        rewards = trained if measured.rewards is None else measured.rewards
        sums = plain_sum(rewards.by_source, setup.terms)
        curriculum.measure(measured.places, sums.reshape(-1, setup.sampling.n))
    return curriculum.metrics()


def step_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the optimiser steps that report it."""
    names = dict.fromkeys(name for step in steps for name in step)
    values = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def actor_metrics(steps: Sequence[Mapping[str, float]], config: PPO) -> dict[str, float]:
    """Returns the ratios at the actor's first step that had a token to train on, or no ratios if no step had
    one. Adds the number of steps without such a token with `sampler_is: mask`, and the number of steps after
    the limit with `stop_kl`."""
    reached = [step for step in steps if "policy/learning_rate" in step]
    taken = [step for step in reached if "policy/ratio" in step]
    metrics = {
        f"policy/first_{name}": step[f"policy/{name}"]
        for step in taken[:1]
        for name in ("ratio", "ratio_gap")
    }
    if config.sampler_is == "mask":
        metrics["policy/empty_steps"] = float(len(reached) - len(taken))
    if config.stop_kl is not None:
        metrics["policy/skipped_steps"] = float(len(steps) - len(reached))
    return metrics


def training_passes(
    updates: Mapping[str, Sequence[Update]], steps: Sequence[Mapping[str, float]], max_epochs: int
) -> dict[str, float]:
    """Returns how many times each trained role passed over the rollout. The actor's steps after `stop_kl`,
    and its steps without a token to train on, do not count."""
    passes = dict.fromkeys(updates, float(max_epochs))
    if "actor" in updates:
        passes["actor"] *= sum("policy/ratio" in step for step in steps) / max(1, len(updates["actor"]))
    return passes


def divergence_of(
    rollouts: Sequence[Rollout], scores: Scores, logprobs: Scored, kl_coef: float, config: PPO
) -> Divergence:
    """Returns the divergence of the rollouts that were trained on, computed from the log-probs of the
    training pass."""
    chosen = [i for i, _ in logprobs]
    references = [scores.ref_logprobs[i] for i in chosen] if scores.ref_logprobs else None
    known = [values for _, values in logprobs]
    return divergence([rollouts[i] for i in chosen], known, references, range(len(chosen)), kl_coef, config)


def sampled_of(fleet: Fleet, setup: Setup, carried: Carried, collector: Collector | None) -> Sampled:
    """Returns an iteration's answers: from the collector, sampled ahead, or newly sampled. With `train_only`,
    returns the kept answers stored under the iteration's number."""
    if isinstance(fleet.engines, KeptAnswers):
        return fleet.engines.take(carried.position, setup)
    if collector:
        return taken(fleet.engines, collector)
    if carried.ahead:
        return carried.ahead
    return sample(fleet.engines, fleet, setup, carried.position, carried.statistics)


def taken(engines: RolloutGroup, collector: Collector) -> Sampled:
    """Returns an iteration's answers from the collector. Restarts engines that die in the meantime."""
    while (sampled := collector.take()) is None:
        engines.revive()
    return sampled


def updates_of(credited: Credited, schedule: IterationSchedule, kl_coef: float) -> dict[str, list[Update]]:
    """Returns each role's optimiser steps."""
    batches = minibatches(credited.usable, schedule)
    return {
        # with fewer answers there are fewer batches
        role: [
            Update(batch, rate, kl_coef, credited.value_clip)
            for batch, rate in zip(batches, rates, strict=False)
        ]
        for role, rates in schedule.rates.items()
    }


def minibatches(usable: Sequence[int], schedule: IterationSchedule) -> list[list[int]]:
    """Returns the indices of the rollouts in each optimiser step. Shuffles the usable rollouts once per
    epoch, with a fixed seed, and splits each order into steps of (nearly) equal size."""
    batches: list[list[int]] = []
    for epoch in range(schedule.max_epochs):
        order = list(usable)
        random.Random(f"{schedule.shuffle_seed}-{epoch}").shuffle(order)
        steps = min(schedule.steps_per_epoch, len(order))
        edges = [len(order) * i // steps for i in range(steps + 1)]
        batches += [order[start:end] for start, end in pairwise(edges)]
    return batches


def metrics_by_name(rollouts: Sequence[Rollout], rewards: Rewards, config: PPO) -> dict[str, float]:
    """Returns the metrics of each task and each environment that data rows name."""
    rows = [rollout.prompt.row for rollout in rollouts]
    lengths = [int(np.count_nonzero(rollout.document.mask_array)) for rollout in rollouts]
    metrics = task_metrics(config.reward, rewards.by_source, rows, lengths)
    if config.environments:
        names = [row[ENVIRONMENT] for row in rows]
        metrics |= environment_metrics(config.reward, rewards.by_source, names, lengths)
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns means over the episodes of an environment: answers, conversations, attempts, the environment's
    own seconds, and the fraction of episodes that each limit ended. Empty without an environment."""
    own = [rollout.own for rollout in rollouts if rollout.own is not None]
    if not own:
        return {}
    means = {
        f"environment/{name}": sum(getattr(o, name) for o in own) / len(own)
        for name in ("turns", "conversations", "attempts", "seconds")
    }
    return means | {
        f"environment/ended_by_{limit}": sum(o.ended_by == limit for o in own) / len(own)
        for limit in get_args(Limit)
    }


def size_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the fraction of truncated prompts and the total number of tokens."""
    return {
        "prompt/truncated": sum(rollout.prompt.truncated for rollout in rollouts) / len(rollouts),
        "tokens": float(sum(len(rollout.document.tokens) for rollout in rollouts)),
    }
