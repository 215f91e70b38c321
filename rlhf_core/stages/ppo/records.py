"""Defines the records of the PPO process: Rollout (one sampled answer) -> Scores (of all models) -> Experience (to train on)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf_core.data.documents import Document, Prompt
from rlhf_core.rewards.clients import Rewards


@dataclass(frozen=True)
class Rollout:
    """Holds one answer. `sampler_logprobs` (T,) is aligned with the document's tokens, 0 on the prompt; `finished`: not cut by length."""

    prompt: Prompt
    document: Document
    sampler_logprobs: np.ndarray
    finished: bool


@dataclass(frozen=True)
class Scores:
    """Holds what models and reward sources computed for each rollout: per-token (T,) arrays by document. Without a critic values are 0;
    without a reference its log-probs are the actor's."""

    logprobs: list[np.ndarray]
    ref_logprobs: list[np.ndarray]
    values: list[np.ndarray]
    rewards: Rewards


@dataclass(frozen=True)
class Experience:
    """Holds one rollout to train on; arrays (T,), aligned with the document's tokens."""

    document: Document
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    values: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    is_weights: np.ndarray
