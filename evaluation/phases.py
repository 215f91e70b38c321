"""Where an iteration of PPO spends its time, beside what it must take at least, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PHASE, FLOOR, WAIT = "phase/", "floor/", "wait/"


class Phase(NamedTuple):
    """Seconds of one phase, and its floor: operations and bytes at the ceilings measured on the card; None where none is known."""

    name: str
    seconds: float
    share: float
    floor: float | None

    @property
    def times(self) -> float | None:
        """How often the floor fits."""
        return self.seconds / self.floor if self.floor else None


def phases_of(metrics: Mapping[str, float]) -> list[Phase]:
    """The phases of an iteration, the longest first."""
    seconds = {name.removeprefix(PHASE): value for name, value in metrics.items() if name.startswith(PHASE)}
    whole = sum(seconds.values()) or 1.0
    phases = [Phase(name, value, value / whole, metrics.get(FLOOR + name)) for name, value in seconds.items()]
    return sorted(phases, key=lambda phase: -phase.seconds)


def waits_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The share of an iteration in which each role waits for others."""
    return {name.removeprefix(WAIT): value for name, value in metrics.items() if name.startswith(WAIT)}
