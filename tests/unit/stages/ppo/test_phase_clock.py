"""The timeline of a PPO iteration: spans of calls, the stage's phases, GPUs by number, the stored file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.cluster.work_log import CallSpan, GroupWork, RankTime, WorkLog
from rlhf_core.runs.timeline import (
    TIMELINE,
    StoredTimeline,
    Timeline,
    TimelineRow,
    read_timeline,
    write_timeline,
)
from rlhf_core.stages.ppo.measured import phase_clock
from rlhf_core.stages.ppo.measured.phase_clock import STAGE, PhaseClock, timeline_of


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time since the clock began, in its one element; the wall clock began at 1,000."""
    passed = [0.0]
    monkeypatch.setattr(phase_clock.time, "time", lambda: 1000.0 + passed[0])
    monkeypatch.setattr(phase_clock.time, "monotonic", lambda: 77.0 + passed[0])
    return passed


def test_a_call_lasts_from_the_first_rank_s_begin_to_the_last_one_s_end() -> None:
    log = WorkLog()
    log.add("score", [RankTime(10.0, 2.0), RankTime(11.0, 4.0)])
    log.add("score", [RankTime(20.0, 1.0)])
    spans = log.take()
    assert spans == [CallSpan("score", 10.0, 15.0, 4.0), CallSpan("score", 20.0, 21.0, 1.0)]
    assert GroupWork(spans, []).seconds() == {"score": 5.0}, "of the slowest rank, without its wait"
    assert log.take() == [] and GroupWork([], []).seconds() == {}


def test_ranks_that_are_called_one_by_one_count_as_the_slowest() -> None:
    alone = [
        [CallSpan("generate", 0, 3, 3.0), CallSpan("look", 3, 4, 1.0)],
        [CallSpan("generate", 0, 5, 5.0)],
        [],
    ]
    assert GroupWork([CallSpan("sync", 6, 7, 1.0)], alone).seconds() == {
        "sync": 1.0,
        "generate": 5.0,
        "look": 1.0,
    }


def test_the_timeline_has_a_row_for_the_stage_and_for_each_role(now: list[float]) -> None:
    clock = PhaseClock()
    with clock.phase("generate"):
        now[0] = 4.0
    with clock.phase("score"):
        now[0] = 6.0
    now[0] = 10.0
    actor = GroupWork([CallSpan("score", 1004.5, 1006.0, 1.5)], [[], []])
    sampler = GroupWork(
        [], [[CallSpan("generate", 1000.0, 1003.0, 3.0)], [CallSpan("generate", 999.0, 1004.0, 5.0)]]
    )
    gpus = {"actor": ["a", "b"], "critic": ["host"], "sampler": ["c", "a"]}
    found = timeline_of(clock, {"actor": actor, "critic": GroupWork([], []), "sampler": sampler}, gpus)
    assert clock.seconds() == {"generate": 4.0, "score": 2.0}
    assert found == Timeline(
        10.0,
        [
            TimelineRow(STAGE, [], [("generate", 0.0, 4.0), ("score", 4.0, 6.0)]),
            TimelineRow("actor", [0, 1], [("score", 4.5, 6.0)]),
            TimelineRow("sampler 0", [2], [("generate", 0.0, 3.0)]),
            TimelineRow("sampler 1", [0], [("generate", 0.0, 4.0)]),
        ],
    ), "a role without work has no row, and work from before the iteration begins with it"


def test_short_gaps_within_a_phase_are_joined_and_others_are_not(now: list[float]) -> None:
    clock = PhaseClock()
    now[0] = 100.0
    spans = [CallSpan("generate", 1000 + i, 1000 + i + 0.7, 0.7) for i in range(50)]
    late = [
        CallSpan("generate", 1060, 1061, 1.0),
        CallSpan("sync", 1061, 1062, 1.0),
        CallSpan("generate", 1062, 1063, 1.0),
    ]
    of_gaps = timeline_of(clock, {"sampler": GroupWork(spans + late, [])}, {}).rows[1].spans
    assert len(of_gaps) == 53, "gaps of 0.3 s are more than 0.2 % of 100 s"
    close = [CallSpan("generate", 1000 + i, 1000 + i + 0.95, 0.95) for i in range(50)]
    now[0] = 1000.0
    assert timeline_of(clock, {"sampler": GroupWork(close + late, [])}, {}).rows[1].spans == [
        ("generate", 0.0, 49.95),
        ("generate", 60, 61),
        ("sync", 61, 62),
        ("generate", 62, 63),
    ]


def test_an_iteration_without_time_or_work_has_an_empty_row(now: list[float]) -> None:
    assert timeline_of(PhaseClock(), {}, {}) == Timeline(0.0, [TimelineRow(STAGE, [], [])])


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    timeline = Timeline(2.0, [TimelineRow("actor", [0, 3], [("train", 0.25, 1.75)])])
    write_timeline(tmp_path, 1, timeline)
    write_timeline(tmp_path, 7, timeline)
    assert read_timeline(tmp_path) == StoredTimeline(7, timeline)


@pytest.mark.parametrize("text", ["", "{}", "[1, [2.0]]", '[1, [2.0, [["a", ["b"], []]]]]', "\x00"])
def test_what_is_no_timeline_is_none(tmp_path: Path, text: str) -> None:
    assert read_timeline(tmp_path) is None
    (tmp_path / TIMELINE).write_text(text)
    assert read_timeline(tmp_path) is None
