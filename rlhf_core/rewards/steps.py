"""Places the rewards of an answer's steps on its tokens. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_core.rewards.contract import Steps


def on_tokens(steps: Steps, tokens: Sequence[int], decode: Callable[[Sequence[int], bool], str]) -> np.ndarray:
    """Returns the reward of each of an answer's tokens, (T,): a step's is at the token that completes its last character, or at the last.

    `decode` returns the text of tokens, without special tokens when its second argument is true.
    """
    rewards = np.zeros(len(tokens), np.float32)
    for end, reward in steps:
        count = bisect_left(range(len(tokens)), end, lo=1, key=lambda count: len(decode(tokens[:count], True)))
        rewards[count - 1] += reward
    return rewards
