"""Measures the KL to each teacher, for a policy with several teachers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.rewards.row_teachers import places_by_teacher
from rlhf_core.stages.ppo.rollout_records import Rollout


def kl_by_teacher(chosen: Sequence[Rollout], estimates: Tensor, config: PPO) -> dict[str, float]:
    """Returns the mean KL per token to each teacher on its own answers, in nats, as `kl/teacher/NAME`.
    `estimates` (N,) holds the estimates for all response tokens of the `chosen` rollouts. A teacher without
    an answer has no metric."""
    if not config.teachers:
        return {}
    rows = [rollout.prompt.row for rollout in chosen]
    by_answer = estimates.split([int(np.count_nonzero(rollout.document.mask_array)) for rollout in chosen])
    metrics = {}
    for name, places in places_by_teacher(config.teachers, rows).items():
        if name:
            own = torch.cat([by_answer[i] for i in places])
            metrics[f"kl/teacher/{name}"] = float(own.mean(dtype=torch.float64))
    return metrics
