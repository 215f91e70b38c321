"""`environment: guess`: the model guesses a number; after a wrong guess the environment replies `higher` or
`lower`.

The secret number changes with every prompt and iteration. Each episode starts with the row's prompt, which
should explain the game.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_core.environments.conversation import Conversation

NUMBER = re.compile(r"\d+")


class Guess:
    """Lets the model guess a number from 1 to `largest` in `guesses` attempts. The reward is 1 for guessing
    the secret, otherwise 0. An answer without a number ends the episode."""

    def __init__(self, largest: int = 3, guesses: int = 2, higher: str = "higher", lower: str = "lower"):
        if largest < 2 or guesses < 1:
            raise ValueError("largest must be 2 or more, and guesses 1 or more")
        self._largest = largest
        self._guesses = guesses
        self._higher = higher
        self._lower = lower

    async def rollout(self, task: dict[str, Any], model: Conversation) -> float:
        secret = model.random.randint(1, self._largest)
        said: list[str] = []
        for _ in range(self._guesses):
            answer = await model.answer(*said)
            found = NUMBER.search(answer.text)
            if found is None:
                return 0.0
            guess = int(found.group()[:9])
            if guess == secret:
                return 1.0
            said = [self._higher if guess < secret else self._lower]
        return 0.0
