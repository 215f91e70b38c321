"""Measures how the answers of an iteration vary, which mean values do not show: groups without a signal,
lengths, and advantages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

PERCENTILES = (10, 50, 90)


def group_signal(rewards: Tensor, scored: Tensor, samples: int) -> dict[str, float]:
    """Returns `reward/equal_groups`: the fraction of prompts with at least two rewarded answers whose rewards
    are all equal. `rewards` and `scored` are (B,), with `samples` consecutive answers per prompt. Empty if no
    prompt has two rewarded answers."""
    equal: list[bool] = []
    for start in range(0, len(rewards), samples):
        group = slice(start, start + samples)
        known = rewards[group][scored[group]]
        if len(known) >= 2:
            equal.append(bool((known == known[0]).all()))
    return {"reward/equal_groups": sum(equal) / len(equal)} if equal else {}


def length_spread(lengths: Tensor) -> dict[str, float]:
    """Returns percentiles and the maximum of the answers' `lengths` (B,), in tokens."""
    values = np.percentile(lengths.numpy(), PERCENTILES)
    metrics = {f"response/length_p{at}": float(v) for at, v in zip(PERCENTILES, values, strict=True)}
    return metrics | {"response/length_max": float(lengths.max())}


def length_correlation(rewards: Tensor, lengths: Tensor, scored: Tensor, samples: int) -> float:
    """Returns Pearson's correlation of reward and length, both (B,), over the `scored` answers; 0 if either
    does not vary. With several answers per prompt, both are measured relative to the prompt's mean, which
    removes the effect of prompts that need long answers."""
    of_reward: list[Tensor] = []
    of_length: list[Tensor] = []
    size = samples if samples > 1 else len(rewards)
    for start in range(0, len(rewards), size):
        group = slice(start, start + size)
        known = scored[group]
        if known.any():
            of_reward.append(_centred(rewards[group][known]))
            of_length.append(_centred(lengths[group][known]))
    if not of_reward:
        return 0.0
    x = torch.cat(of_reward)
    y = torch.cat(of_length)
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else 0.0


def advantage_spread(advantages: Tensor) -> dict[str, float]:
    """Returns the standard deviation and the largest absolute value of advantages (N,). The advantages are
    per answer, or per token to train on."""
    values = advantages.double()
    return {
        "advantage/std": float(values.std(correction=0)),
        "advantage/max": float(values.abs().max()),
    }


def _centred(values: Tensor) -> Tensor:
    values = values.double()
    return values - values.mean()
