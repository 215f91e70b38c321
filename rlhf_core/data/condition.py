"""Conditional SFT: the reward of an answer stands at the end of its prompt, so that a prompt can ask for a reward. Torch-free.

Training writes ` <rm_score>: 0.73` after each prompt, the reward standardised over the data of the stage (one round of a loop). The
checkpoint keeps the suffix of the best answer it saw (`prompt_suffix.json`), and whoever samples from it puts that after each prompt.
A model of a later stage, trained on prompts without rewards, has no such file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_core.data.documents import Message
from rlhf_core.stage import write_text

SUFFIX = " <rm_score>: {:.2f}"
FILE = "prompt_suffix.json"


def reward_suffix(rewards: Sequence[float]) -> Callable[[float], str]:
    """What a prompt ends with, by the reward of its answer: standardised to mean 0 and standard deviation 1 over `rewards`.

    ValueError when they are all the same.
    """
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    if std == 0:
        raise ValueError(f"all {len(rewards)} rewards are {mean:g}, so there is nothing to condition on: use condition none, or other data")
    return lambda reward: SUFFIX.format(round((reward - mean) / std, 2) + 0.0)  # + 0.0: no "-0.00"


def with_suffix(prompt: Sequence[Message], suffix: str) -> list[Message]:
    """The prompt with the suffix after its last message."""
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + suffix}] if suffix else list(prompt)


def store_suffix(checkpoint: Path, suffix: str) -> None:
    write_text(checkpoint / FILE, json.dumps({"prompt_suffix": suffix}) + "\n")


def stored_suffix(model: str) -> str:
    """What prompts to this model end with to ask for its best answers; "" for a model that knows no rewards, or a Hub id."""
    file = Path(model) / FILE
    return str(json.loads(file.read_text())["prompt_suffix"]) if file.is_file() else ""
