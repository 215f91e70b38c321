"""Defines the report of a calibration, `report/calibration.json`, and its metrics and tables. Torch-free."""

from __future__ import annotations

from rlhf_core.records import Frozen, Judging
from rlhf_core.system.markdown_table import table

CALIBRATION = "calibration.json"
OUTCOMES = ("A", "tie", "B")
TITLES = {
    "agreement": "same winner as people",
    "agreement_decided": "same winner, over pairs that neither calls a tie",
    "kappa": "Cohen's kappa",
    "position_bias": "position bias: wins of the answer shown first minus shown second",
    "swap_consistency": "same winner in both orders",
    "length_bias": "length bias: prefers the longer answer, minus people",
    "length_error_gap": "errors towards the longer answer, minus towards the shorter",
    "markdown_bias": "markdown bias: prefers the more marked-up answer, minus people",
    "markdown_error_gap": "errors towards the more marked-up answer, minus towards the other",
    "human_agreement": "two people: same winner",
    "human_kappa": "people: Fleiss' kappa",
    "human_repeat": "same person, same pair twice: same winner",
}
# Landis & Koch 1977, table on page 165: upper ends of the ranges, with their names.
STRENGTHS = ((0.2, "slight"), (0.4, "fair"), (0.6, "moderate"), (0.8, "substantial"), (1.0, "almost perfect"))


class Estimate(Frozen):
    """A value with its 95 % interval."""

    value: float
    ci_low: float
    ci_high: float


class CalibrationReport(Frozen):
    """The contents of `calibration.json`.

    `judge`: the judge's name; `identity`: a digest of the settings that affect its verdicts
    (`judge_identity`); the calibration is valid only for these settings. `unjudged`: the number of pairs
    without a verdict; they count only in the measures of the annotators themselves. `confusion`: rows are
    people's A, tie, B; columns are the judge's.
    """

    judge: str
    identity: str
    pairs: int
    uids: int
    labels: int
    annotators: int
    unjudged: int
    measures: dict[str, Estimate]
    confusion: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]
    judging: Judging

    @property
    def strength(self) -> str:
        """Returns the name of the range that contains kappa; '' when there is no kappa."""
        kappa = self.measures.get("kappa")
        if kappa is None:
            return ""
        return (
            "poor"
            if kappa.value < 0
            else next((name for end, name in STRENGTHS if kappa.value <= end), STRENGTHS[-1][1])
        )

    @property
    def rows(self) -> list[tuple[str, Estimate]]:
        """Returns the measures with their titles, in the order of TITLES."""
        return [(title, self.measures[name]) for name, title in TITLES.items() if name in self.measures]


def metrics(report: CalibrationReport) -> dict[str, float]:
    """Returns `kappa`, `kappa/ci_low`, `kappa/ci_high`, ... and the counts."""
    found = {
        "pairs": report.pairs,
        "uids": report.uids,
        "labels": report.labels,
        "annotators": report.annotators,
    }
    found |= {"unjudged": report.unjudged, "failed_games": report.judging.failed}
    values = {name: float(value) for name, value in found.items()}
    for name, one in report.measures.items():
        values |= {name: one.value, f"{name}/ci_low": one.ci_low, f"{name}/ci_high": one.ci_high}
    use = report.judging
    counted = (
        {"input_tokens": use.input_tokens, "output_tokens": use.output_tokens, "cost": use.cost}
        if use.input_tokens
        else {}
    )
    return values | {f"judge_{name}": float(value) for name, value in counted.items() if value is not None}


def calibration_tables(report: CalibrationReport) -> str:
    """Returns the measures and the confusion matrix as markdown tables."""
    rows = [
        (title, f"{one.value:.3f}", f"{one.ci_low:.3f} to {one.ci_high:.3f}") for title, one in report.rows
    ]
    cells = [(f"people: {name}", *row) for name, row in zip(OUTCOMES, report.confusion, strict=True)]
    counts = (
        f"{report.pairs} pairs of {report.uids} questions, {report.annotators} annotators,"
        f" {report.judging.failed} games without verdict"
    )
    header = ("", *(f"judge: {name}" for name in OUTCOMES))
    return (
        f"{report.judge}:"
        f" {counts}.\n\n{table(('measure', 'value', '95 % interval'), rows)}\n{table(header, cells)}"
    )
