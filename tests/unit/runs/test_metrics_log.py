"""The log of a stage's metrics: what an attempt that was killed has logged beyond the state that the next one
resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_core.runs.metrics_log import Tracker, read_metrics
from rlhf_core.runs.run_dir import RunDir


@pytest.mark.parametrize("first", [0, 2])
def test_each_step_is_there_once(first: int, tmp_path: Path) -> None:
    for attempt, steps in enumerate([range(1, 5), range(first + 1, 4)]):
        tracker = Tracker(RunDir(tmp_path), 10, steps.start - 1)
        for step in steps:
            tracker.log(step, {"loss": 10.0 * attempt + step})
        tracker.close()
    expected = [(step, step + 10.0 * (step > first)) for step in range(1, 4)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == expected
