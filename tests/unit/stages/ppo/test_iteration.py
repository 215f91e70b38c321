"""Cuts an iteration's answers into optimiser steps."""

from __future__ import annotations

from itertools import chain

from rlhf_core.stages.ppo.iteration import IterationSchedule, minibatches
from rlhf_core.stages.ppo.train import final_metrics


def test_minibatches_take_each_usable_answer_once_an_epoch() -> None:
    whole = minibatches(range(8), IterationSchedule(2, 2, {}, "0"))
    assert [len(batch) for batch in whole] == [4] * 4
    assert sorted(whole[0] + whole[1]) == sorted(whole[2] + whole[3]) == list(range(8))
    assert whole[0] != whole[2]
    fewer = minibatches([0, 2, 3, 5, 7], IterationSchedule(2, 1, {}, "0"))
    assert [len(batch) for batch in fewer] == [2, 3] and sorted(chain(*fewer)) == [0, 2, 3, 5, 7]
    assert minibatches([4], IterationSchedule(2, 1, {}, "0")) == [[4]]


def test_a_result_counts_iterations_and_not_their_log_lines() -> None:
    lines = [{"step": number, "time": 0.0, "reward/mean": number / 10} for number in (10, 20, 30)]
    metrics = final_metrics(lines)
    assert metrics["iterations"] == 30
    assert metrics["reward/first_fifth"] == 1.0
    assert metrics["reward/last_fifth"] == 3.0
