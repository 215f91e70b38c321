"""Reads PPO's records of its iterations: sampled answers, and the seconds of each phase with their lower
bounds. Does not import matplotlib."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.data.rows.columns import written
from rlhf_core.runs.run_dir import ROLLOUTS

SHOWN_ROLLOUTS = 4  # per iteration
MAX_LINE = 4 << 20  # size limit of a rollout that is shown, in bytes


class ShownRollout(NamedTuple):
    """A sampled answer or episode: its messages as (role, text), its rewards by source (None if the source
    failed), and the reason for a missing reward."""

    messages: list[tuple[str, str]]
    rewards: dict[str, float | None]
    failure: str


def rollouts(run_dir: Path) -> list[tuple[int, list[ShownRollout]]]:
    """Returns a few rollouts from PPO's first and last logged iterations, skipping iterations that cannot be
    read; an empty list for other stages."""
    named = {
        file.stem.removeprefix("iteration"): file
        for file in (run_dir / ROLLOUTS).glob("iteration*.jsonl")
        if not file.is_symlink()
    }
    files = {int(number): file for number, file in named.items() if number.isascii() and number.isdigit()}
    found = []
    for iteration in sorted({min(files), max(files)}) if files else ():
        try:
            with files[iteration].open("rb") as file:
                # a longer line is truncated, so it is not valid JSON
                rows = [json.loads(line) for _ in range(SHOWN_ROLLOUTS) if (line := file.readline(MAX_LINE))]
            found.append((iteration, [_rollout(row) for row in rows]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _rollout(row: dict[str, Any]) -> ShownRollout:
    messages = row.get("messages") or [*row["prompt"], {"role": "assistant", "content": row["response"]}]
    texts = [(str(message["role"]), written(message)) for message in messages]
    rewards = {
        str(source): None if reward is None else float(reward) for source, reward in row["rewards"].items()
    }
    return ShownRollout(texts, rewards, str(row.get("failure", "")))


PHASE = "phase/"
FLOOR = "floor/"
WAIT = "wait/"


class TimedPhase(NamedTuple):
    """The seconds of one phase, and its floor: the time that its operations and bytes take at the rates
    measured on the GPU; None if unknown."""

    name: str
    seconds: float
    share: float
    floor: float | None

    @property
    def times(self) -> float | None:
        """Returns the seconds divided by the floor; None if there is no floor."""
        return self.seconds / self.floor if self.floor else None


def phases_of(metrics: Mapping[str, float]) -> list[TimedPhase]:
    """Returns the phases of an iteration, longest first."""
    seconds = {name.removeprefix(PHASE): value for name, value in metrics.items() if name.startswith(PHASE)}
    whole = sum(seconds.values()) or 1.0
    phases = [
        TimedPhase(name, value, value / whole, metrics.get(FLOOR + name)) for name, value in seconds.items()
    ]
    return sorted(phases, key=lambda phase: -phase.seconds)
