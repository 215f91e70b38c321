"""Manages the loss scale that DeepSpeed uses for float16 training (Micikevicius et al. 2018, section 3.2).

Small gradients would underflow to 0 in float16, so the loss is multiplied by a scale and the fp32 gradients
are divided by it. After `loss_scale_window` steps without overflow the scale doubles. A step that overflows
is skipped; from the second overflow on (`hysteresis`) the scale is also halved. If the loss itself is not
finite, its gradient does not count as an overflow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.system.files import write_text
from rlhf_core.training.engine import Scaling

FILE = "loss_scale.json"
# DeepSpeed's own defaults
FP16 = {
    "enabled": True,
    "loss_scale": 0,  # dynamic
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
KEPT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """The loss scale of one engine, equal on all ranks. `scaler`: the loss scaler of DeepSpeed's
    optimiser."""

    def __init__(self, scaler: Any):
        self._scaler = scaler
        scaler.raise_error_at_min_scale = False
        self.overflows = 0  # steps skipped because of an overflow

    @property
    def scaling(self) -> Scaling:
        return Scaling(float(self._scaler.cur_scale), self.overflows)

    def step(self, step: Callable[[], object], tainted: Callable[[], bool] = lambda: False) -> bool:
        """Runs an optimiser step and returns whether it was skipped because its gradient is not finite.

        `tainted` returns whether the loss is not finite either, in which case the scale and the count stay
        unchanged. It is called only for a skipped step, on all ranks. The scale is updated after the step:
        DeepSpeed updates it before dividing the gradients by it, and would halve the gradient of the step in
        which the scale doubles. Raises FloatingPointError when a gradient overflows at the lowest scale.
        """
        overflow: list[bool] = []
        self._scaler.update_scale = overflow.append
        try:
            step()
        finally:
            del self._scaler.update_scale
        skipped = overflow == [True]
        if skipped and tainted():
            return True
        lowest = self._scaler.cur_scale <= self._scaler.min_scale
        self._scaler.update_scale(skipped)
        self.overflows += skipped
        if skipped and lowest:
            raise FloatingPointError(
                "a gradient is too large for float16 even without a loss scale: set dtype to bfloat16"
            )
        return skipped

    def save(self, folder: Path) -> None:
        """Writes the scale and the counters that determine its next change."""
        state = {name: getattr(self._scaler, name) for name in KEPT}
        write_text(folder / FILE, json.dumps(state | {"overflows": self.overflows}))

    def load(self, folder: Path) -> None:
        """Reads the file written by `save`, if it exists; the state of a run in another dtype does not
        contain it."""
        if not (folder / FILE).is_file():
            return
        state = json.loads((folder / FILE).read_text())
        self.overflows = state["overflows"]
        for name in KEPT:
            setattr(self._scaler, name, state[name])
