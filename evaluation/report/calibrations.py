"""Collects the report's section on calibrations: how reliable the judges are, and which judges were not
calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evaluation.calibration.calibration_report import CALIBRATION, CalibrationReport
from evaluation.report.summary import Evaluated, Evidence
from evaluation.report.template import percent
from rlhf_core.config import RuleJudge
from rlhf_core.config.judging.calibration import judge_identity


class Calibrated(NamedTuple):
    """A finished calibration stage."""

    name: str
    report: CalibrationReport


def calibrations(stages: Sequence[Evidence]) -> list[Calibrated]:
    """Returns every finished calibration."""
    found = []
    for stage in stages:
        if stage.report and (report := CalibrationReport.read(stage.report / CALIBRATION)):
            found.append(Calibrated(stage.view.name, report))
    return found


def judge_belief(evaluated: Evaluated | None, stages: Sequence[Evidence]) -> str:
    """Returns a sentence about the deciding judge's agreement with people, from the run's last calibration of
    the same judge, or about the lack of a calibration; '' for a rule, which needs no calibration. A run has
    only results of its current recipe, so a calibration of an earlier checkpoint counts as a calibration of
    another judge."""
    request = evaluated.stage.request if evaluated else None
    if evaluated is None or request is None or not request.config.judges_of_answers:
        return ""
    judge = request.config.judges_of_answers[0]
    name = evaluated.report.judge
    if isinstance(judge, RuleJudge):
        return ""
    arguments = getattr(request.config, "template_args", {})
    identity = judge_identity(judge, request.inputs, arguments)
    known = [found for found in calibrations(stages) if found.report.identity == identity]
    if not known:
        return f"The judge {name} is not calibrated: add a stage of kind calibration."
    report = known[-1].report
    agreement = report.measures.get("agreement")
    kappa = report.measures.get("kappa")
    if agreement is None:
        return f"The judge {name} gave no verdict in its calibration {known[-1].name}."
    told = (
        f"The judge {name} chooses the same winner as people in {percent(agreement.value)} of {report.pairs}"
        " pairs"
    )
    return (
        f"{told} (kappa {kappa.value:.2f}, 95 % interval {kappa.ci_low:.2f} to {kappa.ci_high:.2f})."
        if kappa
        else f"{told}."
    )
