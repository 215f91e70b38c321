"""Measures what the stage and its roles did during one iteration and when they did it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlhf_core.cluster.work_log import CallSpan, GroupWork, seconds_by_phase
from rlhf_core.runs.timeline import Timeline, TimelineRow

HOST = "host"  # used in place of a GPU name
STAGE = "stage"  # name of the row that holds the phases the stage waited for
JOINED = 0.002  # as a fraction of an iteration; closes shorter gaps between spans of one phase


class PhaseClock:
    """Measures the phases of an iteration, which begins when the clock is created."""

    def __init__(self) -> None:
        self.begin = time.time()
        self.spans: list[CallSpan] = []
        self._start = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the wall-clock seconds of a phase. Each phase ends by waiting for its workers' results, so
        that its work does not count towards the next phase. Sampling ahead and scoring that overlap other
        phases count only while something waits for them."""
        start = self.elapsed()
        yield
        end = self.elapsed()
        self.spans.append(CallSpan(name, self.begin + start, self.begin + end, end - start))

    def elapsed(self) -> float:
        """Returns the seconds since the iteration began."""
        return time.monotonic() - self._start

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase."""
        return seconds_by_phase(self.spans)


def timeline_of(
    clock: PhaseClock, work: Mapping[str, GroupWork], gpus: Mapping[str, Sequence[str]]
) -> Timeline:
    """Returns the timeline of the iteration that ends now. `work` holds each role's work since the iteration
    began. Engines that were called individually have a row each. `gpus` holds the names of each role's
    GPUs."""
    whole = clock.elapsed()
    cards = dict.fromkeys(gpu for own in gpus.values() for gpu in own if gpu != HOST)
    numbers = {gpu: number for number, gpu in enumerate(cards)}
    rows = [TimelineRow(STAGE, [], _drawn(clock.spans, clock.begin, whole))]
    for role, done in work.items():
        own = gpus.get(role, [])
        for name, held, spans in _parts(role, own, done):
            known = sorted({numbers[gpu] for gpu in held if gpu != HOST})
            rows.append(TimelineRow(name, known, _drawn(spans, clock.begin, whole)))
    return Timeline(whole, rows)


def _parts(
    role: str, gpus: Sequence[str], work: GroupWork
) -> Iterator[tuple[str, Sequence[str], Sequence[CallSpan]]]:
    """Yields the name, GPUs and spans of a role as a whole, and of each rank that was called individually."""
    if work.together:
        yield role, gpus, work.together
    ranks = len(work.alone)
    for rank, spans in enumerate(work.alone):
        if spans:
            of_rank = len(gpus) // ranks
            name = f"{role} {rank}" if ranks > 1 else role
            yield name, gpus[rank * of_rank : (rank + 1) * of_rank], spans


def _drawn(spans: Iterable[CallSpan], begin: float, whole: float) -> list[tuple[str, float, float]]:
    """Returns (phase, begin, end) within the iteration, in order. Joins spans of one phase that are separated
    only by a very short gap."""
    joined: list[tuple[str, float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        first = min(max(span.begin - begin, 0.0), whole)
        last = min(max(span.end - begin, first), whole)
        if joined and joined[-1][0] == span.phase and first - joined[-1][2] < JOINED * whole:
            phase, earlier, until = joined.pop()
            joined.append((phase, earlier, max(until, last)))
        elif last > first:
            joined.append((span.phase, first, last))
    return [(phase, round(first, 4), round(last, 4)) for phase, first, last in joined]
