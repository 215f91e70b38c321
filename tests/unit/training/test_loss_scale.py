"""The loss scale of float16: changed after a step, kept in states, an error at its end; and steps that overflow
in the training loop and in PPO."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.stages.ppo.roles.trained import Trained
from rlhf_core.training.engine import Scaling
from rlhf_core.training.train_loop import _stepped
from rlhf_core.training.zero.loss_scale import LossScale


class Scaler:
    """In place of DeepSpeed's: doubles at each step, halves at each overflow."""

    min_scale = 1.0
    cur_iter = 0
    last_overflow_iter = -1
    cur_hysteresis = 2
    raise_error_at_min_scale = True

    def __init__(self, scale: float = 8.0):
        self.cur_scale = scale

    def update_scale(self, overflow: bool) -> None:
        self.cur_scale = max(1.0, self.cur_scale / 2) if overflow else 2 * self.cur_scale
        self.cur_iter += 1


class Engine:
    """In place of an engine: `overflows` says of each step whether its gradient overflows."""

    def __init__(self, *overflows: bool):
        self.left = list(overflows)
        self.overflows = 0

    @property
    def scaling(self) -> Scaling:
        return Scaling(4.0, self.overflows)

    def step(self, learning_rate: float) -> float | None:
        overflow = self.left.pop(0)
        self.overflows += overflow
        return None if overflow else 1.5


def test_a_step_divides_its_gradients_by_the_scale_that_its_loss_had() -> None:
    scaler = Scaler()
    scale = LossScale(scaler)
    seen = []

    def step(overflow: bool) -> None:
        scaler.update_scale(overflow)  # as DeepSpeed, before it divides
        seen.append(scaler.cur_scale)

    assert [scale.step(lambda on=on: step(on)) for on in (False, True, False)] == [False, True, False]  # type: ignore[misc]
    assert seen == [8, 16, 8] and scale.scaling == Scaling(16.0, 1) and scaler.cur_iter == 3


def test_an_overflow_with_the_lowest_scale_ends_training() -> None:
    scaler = Scaler(1.0)
    scale = LossScale(scaler)
    assert not scaler.raise_error_at_min_scale
    with pytest.raises(FloatingPointError, match=r"too large for float16 .* set dtype to bfloat16"):
        scale.step(lambda: scaler.update_scale(True))
    with pytest.raises(KeyError):
        scale.step(lambda: {}["the step fails"])
    assert "update_scale" not in vars(scaler)


def test_a_gradient_of_a_loss_that_is_not_finite_changes_nothing() -> None:
    scaler = Scaler(1.0)
    scale = LossScale(scaler)
    assert scale.step(lambda: scaler.update_scale(True), tainted=lambda: True)
    assert scale.scaling == Scaling(1.0, 0) and scaler.cur_iter == 0
    assert not scale.step(lambda: scaler.update_scale(False), tainted=lambda: pytest.fail("not skipped"))
    assert scale.scaling == Scaling(2.0, 0)


def test_states_keep_it(tmp_path: Path) -> None:
    scaler = Scaler()
    scale = LossScale(scaler)
    for overflow in (False, True, True):
        scale.step(lambda on=overflow: scaler.update_scale(on))  # type: ignore[misc]
    scaler.cur_hysteresis = 1
    scale.save(tmp_path)
    later = Scaler(1.0)
    resumed = LossScale(later)
    resumed.load(tmp_path / "of another dtype")
    assert resumed.scaling == Scaling(1.0, 0)
    resumed.load(tmp_path)
    assert resumed.scaling == scale.scaling == Scaling(4.0, 2)
    assert (later.cur_iter, later.cur_hysteresis) == (3, 1)


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    engine: Any = Engine(True, True, False)
    assert _stepped(engine, 1e-3, {"loss": 1.0}) is None
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        _stepped(engine, 1e-3, {"loss": math.nan})
    assert _stepped(engine, 1e-3, {"loss": 1.0}) == 1.5


def test_ppo_tells_steps_that_overflow() -> None:
    role: Any = Trained.__new__(Trained)
    role.engine = Engine(True, False)
    rate = {"policy/learning_rate": 1e-3, "policy/loss_scale": 4.0}
    assert role.step("policy", 1e-3) == {"policy/overflow": 1.0, **rate}
    assert role.step("policy", 1e-3) == {"policy/overflow": 0.0, "policy/grad_norm": 1.5, **rate}
