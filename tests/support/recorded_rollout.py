"""A recorded rollout of two answers, and its credit as the stage computes it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from rlhf_core.config import PPO, Data
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term
from rlhf_core.stages.ppo.rewards.credit import credit, divergence
from rlhf_core.stages.ppo.roles.role_passes import on_tokens
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores

# Two answers to one prompt of one token: A of three tokens, B of two.
OLD = [[0.0, -1.0, -0.5, -2.0], [0.0, -0.7, -0.2]]
REFERENCE = [[0.0, -1.5, -0.5, -1.0], [0.0, -0.2, -0.2]]
VALUES = [[0.0, 0.5, 1.0, 1.5], [0.0, 0.25, -0.5]]
SAMPLER = [[0.0, -1.0, -0.5 - math.log(4), -2.0], [0.0, -0.7 + math.log(2), -0.2]]
REWARDS = [2.0, -1.0]
TERMS = [Term("model", 1.0, "none", None)]


def ppo(**changes: object) -> PPO:
    """Two answers to a prompt, lambda 0.5."""
    return PPO(prompts=Data(sources="none"), **{"n_samples_per_prompt": 2, "lambd": 0.5, **changes})


def arrays(rows: list[list[float]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float32) for row in rows]


def answers(finished: tuple[bool, bool] = (False, True), copies: int = 1) -> list[Rollout]:
    """A and B, `copies` times in a row. `finished`: whether no limit cut A, and B."""
    found = []
    for row, sampler, ended in zip(OLD * copies, arrays(SAMPLER) * copies, finished * copies, strict=True):
        document = Document([7, *range(len(row) - 1)], [False, *[True] * (len(row) - 1)])
        found.append(Rollout(Prompt((), [7], {}, False), document, sampler, ended))
    return found


class Credited(NamedTuple):
    """What `credit` and `divergence` found of the rollout."""

    experience: list[Experience]
    usable: list[int]
    kl: float
    metrics: dict[str, float]


def credited(
    config: PPO | None = None, rewards: list[float] = REWARDS, copies: int = 1, kl_coef: float = 0.1
) -> Credited:
    """The rollout, `copies` times in a row, with one reward for each answer."""
    rollouts = answers(copies=copies)
    known = Rewards({"model": np.array(rewards)}, {})
    config = config or ppo()
    scores = Scores(
        arrays(OLD) * copies,
        arrays(REFERENCE) * copies if config.has_reference else None,
        arrays(VALUES) * copies,
        known,
    )
    found = credit(rollouts, scores, kl_coef, {}, config, TERMS)
    apart = divergence(rollouts, arrays(OLD) * copies, scores.ref_logprobs, found.usable, kl_coef, config)
    return Credited(found.experience, found.usable, apart.kl, found.metrics | apart.metrics)


def advantages(found: Credited) -> list[list[float]]:
    return [on_tokens(e.advantages, e.document)[1:].tolist() for e in found.experience]


def close(expected: object) -> object:
    return pytest.approx(expected, rel=1e-5, abs=1e-6)
