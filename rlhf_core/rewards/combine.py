"""Combines the rewards of several sources into one: standardises each source separately, then computes the
weighted sum. Calls no source.

Sources standardised within groups follow GDPO (Liu et al. 2026, arXiv:2601.05242): each reward is
standardised among the answers to one prompt, and the results are added. The paper then standardises the sum
over the batch, which `objectives.advantages.gdpo` does.

An answer that lacks a reward from any source gets none, because an incomplete sum is not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config.rewards import ModelReward, RewardSource
from rlhf_core.models.reward_scoring import stored_statistics
from rlhf_core.objectives.advantages import grpo, in_groups, normalize_rewards
from rlhf_core.rewards.reward_contract import bounded


class Running(NamedTuple):
    """The count, mean and sum of squared deviations of all values so far."""

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: Tensor) -> Running:
        """Returns the statistics with more values added, as if all values had arrived together (Chan, Golub
        and LeVeque 1979)."""
        n = values.numel()
        if n == 0:
            return self
        mean = float(values.double().mean())
        squares = float((values.double() - mean).square().sum())
        total = self.number + n
        gap = mean - self.mean
        return Running(
            total, self.mean + gap * n / total, self.squares + squares + gap * gap * self.number * n / total
        )

    @property
    def std(self) -> float:
        """Returns the population standard deviation, or 1 while all values are equal, so that dividing by it
        changes nothing."""
        return math.sqrt(self.squares / self.number) if self.squares > 0 else 1.0


class Term(NamedTuple):
    """A source in the sum. `stored`: the mean and std stored with the reward model."""

    title: str
    weight: float
    normalize: Literal["none", "stored", "running", "group"]
    stored: tuple[float, float] | None


def term_of(source: RewardSource, path: str | None, default: Literal["none", "stored"] = "none") -> Term:
    """Returns a source's term in the sum. `path`: path of a reward model. `default`: normalisation of a model
    if the recipe names none.

    Raises ValueError when the requested statistics are not stored with the model.
    """
    if not isinstance(source, ModelReward):
        return Term(source.title, source.weight, source.normalize, None)
    normalize = source.normalize or default
    assert path is not None
    return Term(
        source.title, source.weight, normalize, stored_statistics(path) if normalize == "stored" else None
    )


class Combined(NamedTuple):
    """The summed rewards (N,), which are 0 where `scored` (N,) is False, and metrics."""

    rewards: Tensor
    scored: Tensor
    metrics: dict[str, float]


def with_answers(
    statistics: Mapping[str, Running], by_source: Mapping[str, np.ndarray], terms: Sequence[Term]
) -> dict[str, Running]:
    """Returns the running statistics with more answers added, for the sources that are standardised by them.
    Failed rewards do not count."""
    updated = dict(statistics)
    for term in terms:
        if term.normalize == "running":
            values = _narrowed(by_source[term.title])
            updated[term.title] = statistics.get(term.title, Running()).update(values[values.isfinite()])
    return updated


def _narrowed(rewards: np.ndarray) -> Tensor:
    """Returns rewards as float32; finite rewards stay finite."""
    return torch.from_numpy(bounded(rewards).astype(np.float32))


def combine(
    by_source: Mapping[str, np.ndarray],
    terms: Sequence[Term],
    statistics: Mapping[str, Running],
    samples: int = 1,
) -> Combined:
    """Returns the sum of `weight * (reward - mean) / std` over the sources.

    `by_source`: (N,) each, nan for failed rewards. `statistics`: from `with_answers`, including these
    answers. `samples`: number of consecutive answers per prompt. Sources with `normalize: group` are
    standardised among these, as in `objectives.advantages.grpo`, over the answers that every source scored.
    An answer gets 0 if it is its prompt's only answer that every source scored. Raises ValueError when no
    answer has a reward from every source. `reward/mean` and `reward/std` describe the weighted sum before any
    standardisation, so that their scale stays the same throughout the run.
    """
    raw = {term.title: _narrowed(by_source[term.title]) for term in terms}
    scored = torch.stack([values.isfinite() for values in raw.values()]).all(0)
    if not scored.any():
        raise ValueError(
            f"none of {len(scored)} answers has a reward of every source ({', '.join(raw)}): look at the"
            " sources"
        )
    total = torch.zeros(len(scored))
    shown = torch.zeros(len(scored))
    metrics: dict[str, float] = {}
    for term in terms:
        values = raw[term.title]
        given = values[values.isfinite()].double()
        metrics |= {
            f"reward/{term.title}/mean": float(given.mean()),
            f"reward/{term.title}/std": float(given.std(correction=0)),
            f"reward/{term.title}/failed": float(len(values) - len(given)),
        }
        standard = values
        if term.normalize == "stored":
            assert term.stored is not None
            standard = normalize_rewards(values, *term.stored)
        elif term.normalize == "running":
            running = statistics[term.title]
            standard = normalize_rewards(values, running.mean, running.std)
        elif term.normalize == "group":
            assert samples > 1, "there is nothing to compare an answer with"
            standard = in_groups(grpo, values, scored, samples).advantages
        total = total + term.weight * standard
        shown = shown + term.weight * values
    shown = shown[scored].double()  # squares of large rewards overflow float32
    metrics |= {"reward/mean": float(shown.mean()), "reward/std": float(shown.std(correction=0))}
    return Combined(torch.where(scored, total, 0), scored, metrics)


def plain_sum(by_source: Mapping[str, np.ndarray], terms: Sequence[Term]) -> np.ndarray:
    """Returns the weighted sum before any standardisation, (N,), nan where a source failed. Its scale stays
    the same throughout the run."""
    return np.sum([term.weight * bounded(by_source[term.title]) for term in terms], axis=0)
