"""Records when the ranks of a group are working, by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankTime(NamedTuple):
    """The time when a rank began a call, in seconds since 1970 by its host's clock, and the seconds that the
    call took."""

    begin: float
    seconds: float


class CallSpan(NamedTuple):
    """The span of a group's call, from the first rank's start to the last rank's end (seconds since 1970),
    and the seconds that the slowest rank worked."""

    phase: str
    begin: float
    end: float
    seconds: float


class WorkLog:
    """Collects the spans of finished calls until `take` is called."""

    def __init__(self) -> None:
        self._spans: list[CallSpan] = []

    def add(self, phase: str, times: Sequence[RankTime]) -> None:
        """Adds a call that has finished on all ranks of `times`."""
        self._spans.append(
            CallSpan(
                phase,
                min(time.begin for time in times),
                max(time.begin + time.seconds for time in times),
                max(time.seconds for time in times),
            )
        )

    def take(self) -> list[CallSpan]:
        """Returns the spans recorded since the last call of this method, and clears them."""
        spans = self._spans
        self._spans = []
        return spans


class GroupWork(NamedTuple):
    """The spans of a group's calls to all ranks, and, by rank, of its calls to single ranks."""

    together: Sequence[CallSpan]
    alone: Sequence[Sequence[CallSpan]]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the slowest rank worked in each phase, without waiting for other
        groups."""
        spent = seconds_by_phase(self.together)
        for spans in self.alone:
            for phase, taken in seconds_by_phase(spans).items():
                spent[phase] = max(spent.get(phase, 0.0), taken)
        return spent


def seconds_by_phase(spans: Sequence[CallSpan]) -> dict[str, float]:
    """Returns the sum of the seconds of each phase."""
    spent: dict[str, float] = {}
    for span in spans:
        spent[span.phase] = spent.get(span.phase, 0.0) + span.seconds
    return spent
