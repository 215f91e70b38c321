"""Samples the answers of an iteration before its training: for one batch of prompts, or with dynamic
filtering for as many prompts as are needed. With `stream_batch_size`, finished answers are scored in the
meantime.

Filtering draws as many prompts as should fill the batch, given the fraction accepted so far, even past the
end of an episode. Prompts after the last group that is needed go to the next iteration. It answers them
again, so that no accepted group is stale. With a curriculum they are not carried over: they have been
measured, and are drawn again by their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Running, with_answers
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores, join_scores
from rlhf_core.stages.ppo.sampling.group_signal import (
    MOST,
    Looked,
    allowed_of,
    answers_with_signal,
    check_failed,
    kept_metrics,
    looked_metrics,
    no_signal,
)
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.sampled_answers import (
    MeasuredGroups,
    Sampled,
    ScoringModels,
    Setup,
    start_sample,
    stream,
    stream_parts,
)

MORE = 1.2  # a further round draws this many times the prompts it is expected to need


def sample(
    engines: RolloutGroup,
    models: ScoringModels,
    setup: Setup,
    position: int,
    statistics: Mapping[str, Running],
) -> Sampled:
    """Samples answers to a batch of prompts, using `sample_filtered` or `stream` if the recipe requires
    it."""
    if setup.config.dynamic_filtering:
        return sample_filtered(engines, models, setup, position, statistics)
    if setup.config.stream_batch_size is not None:
        return stream(engines, models, setup, position, setup.config.stream_batch_size)
    return start_sample(engines, setup, position)()


def sample_filtered(
    engines: RolloutGroup,
    models: ScoringModels,
    setup: Setup,
    position: int,
    statistics: Mapping[str, Running],
) -> Sampled:
    """Samples until a batch of prompts has answers whose rewards differ (see `group_signal.py`), in at most
    `max_filter_rounds` rounds.

    With `stream_batch_size`, the reward sources score parts of a round while engines work on others. The
    models score the kept answers of a round while engines work on the next one. The same groups are kept as
    without it. Raises ValueError if no group has a signal.
    """
    n = setup.sampling.n
    batch = setup.order.batch
    streams = setup.config.stream_batch_size is not None
    first = position
    updated = dict(statistics)
    kept: list[int] = []
    seen: list[Rollout] = []
    seen_rewards: list[Rewards] = []
    begun: list[Callable[[], Scores]] = []
    accepted = 0
    rounds = 0
    while len(kept) < batch * n and rounds < setup.config.max_filter_rounds:
        missing = batch - len(kept) // n
        asked = len(seen) // n
        count = min(math.ceil(MORE * missing / max(accepted / asked, 0.1)), MOST * batch) if asked else batch
        rollouts, rewards = _rewarded(engines, models, setup, position, count)
        seen_rewards.append(rewards)
        check_failed(join(seen_rewards), setup)
        updated = with_answers(updated, rewards.by_source, setup.terms)
        found = answers_with_signal(rollouts, rewards, updated, setup)
        chosen = found[: missing * n]
        if streams and chosen:
            of_round = [rollouts[i] for i in chosen]
            begun.append(models.start_score(of_round, rewards.take(chosen), setup.allowed_failures))
        kept += [len(seen) + i for i in chosen]
        seen += rollouts
        accepted += len(found) // n
        rounds += 1
        # a curriculum draws other prompts instead of those after the last group
        used_up = len(kept) < batch * n or setup.order.curriculum is not None
        position += count if used_up else chosen[-1] // n + 1
    if not kept:
        raise ValueError(no_signal(len(seen) // n, rounds))
    rewards_seen = join(seen_rewards)
    rewards_kept = rewards_seen.take(kept)
    metrics = looked_metrics(Looked(seen, rewards_seen, accepted, rounds), updated, setup)
    metrics |= kept_metrics(rewards_kept, updated, setup)
    measured = MeasuredGroups(range(first, first + len(seen) // n), rewards_seen)
    answers = [seen[i] for i in kept]
    sampled = Sampled(answers, rewards_kept, position, metrics, statistics=updated, measured=measured)
    if not streams:
        return sampled
    # the failures of all rounds are checked above
    return sampled._replace(scores=lambda: join_scores([wait() for wait in begun], len(kept)))


def _rewarded(
    engines: RolloutGroup, models: ScoringModels, setup: Setup, position: int, count: int
) -> tuple[list[Rollout], Rewards]:
    """Returns the answers to `count` prompts, starting at a position, and their rewards."""
    part = setup.config.stream_batch_size
    if part is None:
        rollouts = start_sample(engines, setup, position, count)().rollouts
        return rollouts, models.reward(rollouts, allowed_of(len(rollouts), setup))
    rollouts, begun = stream_parts(
        engines,
        setup,
        position,
        count,
        part,
        lambda whole: models.start_reward(whole, setup.allowed_failures),
    )
    return rollouts, join([wait() for wait in begun])
