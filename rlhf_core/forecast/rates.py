"""Records the fraction of a GPU's measured rates that the phases of a run reach. Written by `python -m
tests.benchmarks.calibrate --write`."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """`scoring`, `training`, `sharded`: the fraction of the matrix rate reached in passes without gradients,
    in training, and in training under ZeRO-3. `decode_step`: seconds of a vLLM step other than reading
    weights, keys and values. `exposed`: when a node computes and sends at the same time, the fraction of the
    shorter activity that does not overlap with the longer one (assumed)."""

    scoring: float
    training: float
    sharded: float
    decode_step: float
    exposed: float


# The worst, median and best of the calibration runs on H200s and H100s.
SLOW = Rates(0.574, 0.606, 0.418, 0.00549, 1.0)
TYPICAL = Rates(0.666, 0.659, 0.535, 0.00371, 0.5)
FAST = Rates(0.72, 0.698, 0.66, 0.00251, 0.0)
