"""Places the rewards of an answer's steps on its tokens. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from rlhf_core.rewards.reward_contract import Steps


def on_tokens(steps: Steps, lengths: Sequence[int]) -> np.ndarray:
    """Returns the reward of each token of an answer, (T,). A step's reward is at the token that completes the
    step's last character, or at the last token.

    `lengths` (T,): the number of complete characters of the answer after each token.
    """
    rewards = np.zeros(len(lengths), np.float32)
    for end, reward in steps:
        rewards[min(bisect_left(lengths, end), len(lengths) - 1)] += reward
    return rewards
