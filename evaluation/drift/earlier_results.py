"""Finds earlier results of a drift stage in the same artifacts folder. Torch-free.

An earlier result is a finished run directory of the same stage with a different digest and the same
reference. A stage's report therefore depends on the results that exist when the stage runs, although they are
not part of its digest.
"""

from __future__ import annotations

from typing import NamedTuple

from evaluation.drift.drift_report import DRIFT, DriftReport, Earlier, Signal
from rlhf_core.config import Drift
from rlhf_core.runs.run_dir import RunDir, StageRequest

KEPT = 60  # earlier results in a report


class EarlierResult(NamedTuple):
    """A finished earlier result."""

    digest: str
    report: DriftReport

    @property
    def as_earlier(self) -> Earlier:
        return Earlier(
            at=self.report.at, digest=self.digest, model=self.report.model, values=self.report.values
        )


def earlier_results(request: StageRequest, config: Drift, run: RunDir) -> list[EarlierResult]:
    """Returns the earlier results, oldest first, without damaged or unfinished results."""
    found = []
    for folder in run.path.parent.glob(f"{request.name}-*"):
        other = RunDir(folder)
        result = other.result() if folder != run.path else None
        if result and result.stage == "drift" and result.name == request.name and "report" in result.outputs:
            report = DriftReport.read(other / result.outputs["report"] / DRIFT)
            if report and report.reference == config.reference:
                found.append(EarlierResult(result.digest, report))
    return sorted(found, key=lambda one: (one.report.at, one.digest))[-KEPT:]


def with_changes(signals: list[Signal], earlier: list[EarlierResult]) -> list[Signal]:
    """Returns the signals, each with its change from the newest earlier result that has the signal."""
    before: dict[str, float] = {}
    for one in earlier:
        before |= one.report.values
    return [
        s.model_copy(update={"change": s.value - before[s.name]}) if s.name in before else s for s in signals
    ]
