"""Records when the ranks of a group work, by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RankTime(NamedTuple):
    """When a rank began a call (seconds since 1970, by its host's clock), and the seconds that it took."""

    begin: float
    seconds: float


class CallSpan(NamedTuple):
    """A call of a group: from the first rank's begin to the last rank's end (seconds since 1970), and the
    slowest rank's own seconds."""

    phase: str
    begin: float
    end: float
    seconds: float


class WorkLog:
    """Collects the spans of finished calls until `take`."""

    def __init__(self) -> None:
        self._spans: list[CallSpan] = []

    def add(self, phase: str, times: Sequence[RankTime]) -> None:
        """Adds a call that all ranks of `times` have finished."""
        self._spans.append(
            CallSpan(
                phase,
                min(time.begin for time in times),
                max(time.begin + time.seconds for time in times),
                max(time.seconds for time in times),
            )
        )

    def take(self) -> list[CallSpan]:
        """Returns the spans since the last call, and forgets them."""
        spans = self._spans
        self._spans = []
        return spans


class GroupWork(NamedTuple):
    """The spans of a group's calls to all ranks, and of the calls to one rank, by rank."""

    together: Sequence[CallSpan]
    alone: Sequence[Sequence[CallSpan]]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of work by phase, those of the slowest rank, without waits for other groups."""
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
