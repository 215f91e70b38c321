"""Defines the contents of `report/drift.json`, which a drift stage writes. Torch-free."""

from __future__ import annotations

from datetime import datetime

from rlhf_core.records import Frozen

DRIFT = "drift.json"


class Signal(Frozen):
    """One measure of drift over `count` prompts, questions or pairs, with its 95 % interval.

    `p`: the p-value of a test for drift, None if there is no test. `change`: `value` minus the value in the
    previous result.
    """

    name: str
    value: float
    low: float
    high: float
    count: int
    p: float | None = None
    change: float | None = None


class Earlier(Frozen):
    """An earlier finished result of the same stage: its time, digest, model and signal values."""

    at: datetime
    digest: str
    model: str
    values: dict[str, float]


class DriftReport(Frozen):
    """The contents of `drift.json`. `at`: when it was written (UTC). `anchors_at`: when the anchors were
    judged. `history`: earlier results, oldest first."""

    at: datetime
    model: str
    reference: str
    signals: tuple[Signal, ...]
    notes: tuple[str, ...] = ()
    anchors_key: str = ""
    anchors_at: datetime | None = None
    history: tuple[Earlier, ...] = ()

    @property
    def values(self) -> dict[str, float]:
        """Returns the values of the signals by name."""
        return {signal.name: signal.value for signal in self.signals}


def metrics(report: DriftReport) -> dict[str, float]:
    """Returns `<signal>`, `<signal>_low`, `<signal>_high`, and if present `<signal>_p`, `<signal>/change`."""
    found: dict[str, float] = {}
    for signal in report.signals:
        values = {
            "": signal.value,
            "_low": signal.low,
            "_high": signal.high,
            "_p": signal.p,
            "/change": signal.change,
        }
        found |= {f"{signal.name}{suffix}": value for suffix, value in values.items() if value is not None}
    return found
