"""Measures how far judges agree with people or rules before a stage uses them for rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.config.data import Data
from rlhf_core.config.rewarding.judge_models import RatingModel
from rlhf_core.config.rewarding.judge_reward import JudgeReward, LabelledPairs
from rlhf_core.config.rewards import RewardSource
from rlhf_core.data.rows.columns import Located, text_preference_of, written
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.mean_interval import mean_interval
from rlhf_core.rewards.reward_contract import RewardsFailed, Sample

if TYPE_CHECKING:
    from rlhf_core.judging.chat_client import Chat
    from rlhf_core.rewards.judge.judge_client import JudgeClient

# opens a connection to a judge on the stage's engines, which lasts until the block ends
OpenJudge = Callable[[JudgeReward], AbstractContextManager["Chat"]]
JUDGE_CACHE = "judge_cache"  # folder of a run directory


def agreement_metrics(
    sources: Sequence[RewardSource],
    max_failed: float,
    cache: Path | None,
    seed: int,
    open_judge: OpenJudge | None = None,
) -> dict[str, float]:
    """Returns how often each judge with `agreement` prefers the chosen answer of its labelled pairs.

    The metrics are the fraction of pairs (a tie counts 1/2), its 95 % interval (`mean_interval`) and the
    number of pairs; pairs in which an answer has no reward do not count. `cache`: folder for verdicts.
    `open_judge`: for judges on the stage's engines. Raises ValueError when the fraction is below the recipe's
    minimum, and RewardsFailed when more than the fraction `max_failed` of the answers got no reward.
    """
    metrics: dict[str, float] = {}
    for source in sources:
        if isinstance(source, JudgeReward) and source.agreement is not None:
            from rlhf_core.rewards.judge.judge_client import (
                JudgeClient,
            )  # importing its library takes a second

            place = None if cache is None else cache / f"{source.title}.jsonl"
            with opened(source, open_judge) as chat:
                client = JudgeClient(source, place, group=2, chat=chat)
                metrics |= _agreement(source, source.agreement, client, max_failed, seed)
    return metrics


def opened(source: JudgeReward, open_judge: OpenJudge | None) -> AbstractContextManager[Chat | None]:
    """Returns the context in which a judge can be queried; it yields None for a judge behind an endpoint."""
    if isinstance(source.judge, RatingModel):
        return nullcontext(None)
    assert open_judge is not None, "the stage starts its engines"
    return open_judge(source)


def _agreement(
    source: JudgeReward, labels: LabelledPairs, client: JudgeClient, max_failed: float, seed: int
) -> dict[str, float]:
    samples = labelled_samples(labels, seed)
    rewards = client.score(samples, int(max_failed * len(samples))).rewards.reshape(-1, 2)
    judged = rewards[~np.isnan(rewards).any(1)]
    if not len(judged):
        raise RewardsFailed(
            f"the reward source {source.title} judged none of the pairs of {labels.data.path}: look at the"
            " source, then run again"
        )
    points = agreed(judged)
    share = float(points.mean())
    low, high = mean_interval(points, np.ones(len(points)))
    told = (
        f"the judge {source.title} agrees with {labels.data.path} on {share:.3g} of {len(points)} pairs"
        f" (95 % interval {low:.3g} to {high:.3g})"
    )
    if share < labels.min:
        raise ValueError(
            f"{told}, less than min={labels.min:g} of its agreement: change the rubric, take another judge,"
            " or lower min"
        )
    print(told, flush=True)
    name = f"judge/{source.title}"
    return {
        f"{name}/agreement": share,
        f"{name}/agreement/ci_low": low,
        f"{name}/agreement/ci_high": high,
        f"{name}/pairs": float(len(points)),
    }


def agreed(rewards: np.ndarray) -> np.ndarray:
    """Returns 1 where the first of two rewards (N, 2) is higher, 1/2 where they are equal, otherwise 0;
    (N,)."""
    return (1 + np.sign(rewards[:, 0] - rewards[:, 1])) / 2


def labelled_samples(labels: LabelledPairs, seed: int) -> list[Sample]:
    """Returns the chosen and then the rejected answer of each labelled pair, one pair after another. Pairs of
    equal answers are left out. Raises ValueError when no pairs remain."""
    data = Data(sources=(labels.data,), max_samples=labels.limit)
    samples: list[Sample] = []
    for number, row in enumerate(load_rows(data, seed, "preference"), start=1):
        pair = text_preference_of(Located(f"{labels.data.path}, pair {number}", row))
        chosen = written(pair.chosen)
        rejected = written(pair.rejected)
        if chosen != rejected:
            samples += [Sample(pair.prompt, answer, row, True, "") for answer in (chosen, rejected)]
    if not samples:
        raise ValueError(
            f"{labels.data.path} has no pair of different answers to hold a judge against: name another file"
            " in agreement"
        )
    return samples
