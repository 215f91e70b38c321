"""Cuts an iteration's answers into optimiser steps."""

from __future__ import annotations

from itertools import chain

from rlhf_core.stages.ppo.iteration import StepSchedule, minibatches


def test_minibatches_take_each_usable_answer_once_an_epoch() -> None:
    whole = minibatches(range(8), StepSchedule(2, 2, {}, "0"))
    assert [len(batch) for batch in whole] == [4] * 4
    assert (
        sorted(whole[0] + whole[1]) == sorted(whole[2] + whole[3]) == list(range(8)) and whole[0] != whole[2]
    )
    fewer = minibatches([0, 2, 3, 5, 7], StepSchedule(2, 1, {}, "0"))
    assert [len(batch) for batch in fewer] == [2, 3] and sorted(chain(*fewer)) == [0, 2, 3, 5, 7]
    assert minibatches([4], StepSchedule(2, 1, {}, "0")) == [[4]]
