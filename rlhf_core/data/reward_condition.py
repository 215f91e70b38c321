"""Appends the reward of an answer to its prompt (conditional SFT), so that a prompt can request a reward. Torch-free.

Training appends ` <rm_score>: 0.73` to each prompt, the reward standardised over the data of the stage (one round of a loop). The
checkpoint keeps the suffix of the best answer in the data (`prompt_suffix.json`), and sampling from it appends that to each prompt.
A model of a later stage, trained on prompts without rewards, has no such file.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_core.data.documents import Message
from rlhf_core.system.files import write_text

SUFFIX = " <rm_score>: {:.2f}"
FILE = "prompt_suffix.json"


def reward_suffix(rewards: Sequence[float]) -> Callable[[float], str]:
    """Returns the function from an answer's reward to its prompt's suffix: the reward standardised by mean and deviation of `rewards`.

    Raises ValueError when they are all the same.
    """
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    if std == 0:
        raise ValueError(f"all {len(rewards)} rewards are {mean:g}, so there is nothing to condition on: use condition none, or other data")
    return lambda reward: SUFFIX.format(round((reward - mean) / std, 2) + 0.0)  # + 0.0: no "-0.00"


def with_suffix(prompt: Sequence[Message], suffix: str) -> list[Message]:
    """Returns the prompt with the suffix appended to its last message."""
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + suffix}] if suffix else list(prompt)


def store_suffix(checkpoint: Path, suffix: str) -> None:
    """Writes the suffix into a checkpoint."""
    write_text(checkpoint / FILE, json.dumps({"prompt_suffix": suffix}) + "\n")


def stored_suffix(model: str) -> str:
    """Returns the suffix that requests a model's best answers; "" for a model trained without rewards, or a Hub id."""
    file = Path(model) / FILE
    return str(json.loads(file.read_text())["prompt_suffix"]) if file.is_file() else ""
