"""Stores the timeline of PPO's last logged iteration in its run directory. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from rlhf_core.system.files import write_text

TIMELINE = "timeline.json"


class TimelineRow(NamedTuple):
    """The work of one role: the numbers of its GPUs, and (phase, begin, end) in seconds since the iteration
    began. A role without GPUs works on the host."""

    name: str
    gpus: list[int]
    spans: list[tuple[str, float, float]]


class Timeline(NamedTuple):
    """The rows of one iteration, which took `seconds`."""

    seconds: float
    rows: list[TimelineRow]


class StoredTimeline(NamedTuple):
    """The timeline of one iteration. Iterations are numbered from 1."""

    iteration: int
    timeline: Timeline


STORED = TypeAdapter(StoredTimeline)


def write_timeline(run: Path, iteration: int, timeline: Timeline) -> None:
    """Writes the timeline of an iteration, replacing the previous one."""
    write_text(run / TIMELINE, json.dumps(StoredTimeline(iteration, timeline)))


def read_timeline(run: Path) -> StoredTimeline | None:
    """Returns the stored timeline; None if it is missing or unreadable."""
    try:
        return STORED.validate_json((run / TIMELINE).read_bytes())
    except (OSError, ValidationError):
        return None
