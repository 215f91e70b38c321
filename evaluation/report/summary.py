"""Reads the results of a recipe's run from its run directories, for `summary.json` and `report.html`.

Torch-free and Prefect-free. Nothing is cached, so the same directories give the same summary in every
process. Missing parts (a failed stage, no evaluation, a file truncated by a kill) become None or empty values
rather than exceptions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.gates import Verdict
from rlhf_core.records import EvalReport, StageResult, WinRate
from rlhf_core.runs.metrics_log import read_metrics
from rlhf_core.runs.run_dir import RunDir, StageRequest

Status = Literal["done", "skipped", "failed", "interrupted", "not run", "running"]
Curve = list[tuple[float, float]]  # (step, value), with increasing steps


@dataclass(frozen=True)
class StageView:
    """A stage of the plan as the report shows it. `parents`: names of other stages; `status`: its outcome in
    this run; `gates`: verdicts on its result."""

    name: str
    kind: str
    parents: tuple[str, ...]
    run_dir: Path
    status: Status
    gates: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A stage and the contents of its run directory. `curves` maps a metric to its points."""

    view: StageView
    request: StageRequest | None
    result: StageResult | None
    curves: dict[str, Curve]

    @property
    def digest(self) -> str:
        """Returns the stage's digest, which is taken from the directory's name, `<stage name>-<digest>`, if
        the stage has not run yet."""
        return self.result.digest if self.result else self.view.run_dir.name.rpartition("-")[2]

    @property
    def report(self) -> Path | None:
        """Returns the report folder of a finished evaluation or alignment tax; None for other stages."""
        output = self.result.outputs.get("report") if self.result else None
        return self.view.run_dir / output if output else None

    @property
    def checkpoint(self) -> str | None:
        """Returns the model folder, relative to the artifacts folder (`stages/<name>-<digest>/...`); None if
        there is none."""
        output = self.result.outputs.get("checkpoint") if self.result else None
        return f"{self.view.run_dir.parent.name}/{self.view.run_dir.name}/{output}" if output else None

    def stage_of(self, name: str, stages: Sequence[Evidence]) -> str:
        """Returns the stage that `name` in this stage's config refers to (a loop's name refers to its last
        round), or `name` if no stage is found."""
        folder = self.request.inputs.get(name) if self.request else None
        if folder is None or any(stage.view.name == name for stage in stages):
            return name
        return next(
            (s.view.name for s in stages if Path(folder).resolve().is_relative_to(s.view.run_dir.resolve())),
            name,
        )


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation: its stage, the judges' reports (the first judge decides), and the final model
    (the last in the config)."""

    stage: Evidence
    reports: tuple[EvalReport, ...]
    final: str
    folder: Path

    @property
    def report(self) -> EvalReport:
        """Returns the report of the deciding judge."""
        return self.reports[0]

    @property
    def models(self) -> list[str]:
        """Returns the judged models, preceded by the baseline unless it was judged itself."""
        return list(
            dict.fromkeys(
                [*(() if self.report.baseline in self.decided else [self.report.baseline]), *self.decided]
            )
        )

    @property
    def opinions(self) -> list[WinRate]:
        """Returns the win rates according to the other judges."""
        return [rate for other in self.reports[1:] for rate in other.win_rates]

    @property
    def against_parent(self) -> dict[str, WinRate]:
        """Returns the win rates of models against their parents, for parents other than the baseline."""
        return {rate.model: rate for rate in self.report.against_parent}

    @property
    def decided(self) -> dict[str, WinRate]:
        """Returns the win rates according to the first judge, by model."""
        return {rate.model: rate for rate in self.report.win_rates if rate.judge == self.report.judge}


def read(view: StageView) -> Evidence:
    """Reads one run directory. Does not raise for missing or damaged files."""
    run = RunDir(view.run_dir)
    try:
        request = run.request()
    except (OSError, ValidationError):
        request = None
    return Evidence(view, request, run.result(), curves_of(view.run_dir))


def read_evaluation(stages: Sequence[Evidence]) -> Evaluated | None:
    """Returns the recipe's last finished evaluation; None when there is none."""
    for stage in reversed(stages):
        report = (
            EvalReport.read(stage.report / "eval.json")
            if stage.report and stage.view.kind != "regression"
            else None
        )
        models = [rate.model for rate in report.win_rates if rate.judge == report.judge] if report else []
        named = stage.request.config.final_model if stage.request else None
        if stage.report and report and models:
            reports = (report, *_opinions(stage.report / "second_opinions.json"))
            return Evaluated(stage, reports, named if named in models else models[-1], stage.report)
    return None


def summary_of(recipe_name: str, stages: Sequence[Evidence]) -> dict[str, Any]:
    """Returns the contents of `summary.json`. Each stage has its name, kind, status, seconds, checkpoint,
    digest, final metrics and gates, and the win rate of its model against the baseline with a 95 % interval
    (all in [0, 1]). `evaluation` has the win rate of the final model and, under `models`, the win rates of
    all models; it is None when no evaluation has finished."""
    evaluated = read_evaluation(stages)
    summary: dict[str, Any] = {
        "recipe": recipe_name,
        "stages": [
            {
                "name": stage.view.name,
                "stage": stage.view.kind,
                "status": stage.view.status,
                "seconds": round(stage.result.seconds, 2) if stage.result else None,
                "checkpoint": stage.checkpoint,
                "digest": stage.digest,
                "metrics": dict(sorted(stage.result.metrics.items())) if stage.result else {},
                "evaluation": None,
                "gates": [verdict.record() for verdict in stage.view.gates],
            }
            for stage in stages
        ],
        "evaluation": None,
    }
    if evaluated:
        models: dict[str, dict[str, Any]] = {model: _score(rate) for model, rate in evaluated.decided.items()}
        for model, rate in evaluated.against_parent.items():
            if model in models:
                models[model]["against_parent"] = {"parent": rate.baseline, **_score(rate)}
        summary["evaluation"] = {"model": evaluated.final, **models[evaluated.final], "models": models}
        places = evaluated.stage.request.inputs if evaluated.stage.request else {}
        for record, stage in zip(summary["stages"], stages, strict=True):
            own = (
                score
                for model, score in models.items()
                if Path(places.get(model, "")).parent == stage.view.run_dir
            )
            record["evaluation"] = next(own, None)
    return summary


def as_json(summary: dict[str, Any]) -> str:
    """Returns strict JSON, in which numbers that are not finite become null."""
    return json.dumps(_finite(summary), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


class Trend(NamedTuple):
    """The means of the first and last fifth of a curve. `errors`: their difference in standard errors; None
    when the standard error is 0."""

    first: float
    last: float
    errors: float | None


def trend(curve: Curve) -> Trend | None:
    """Compares the ends of a noisy curve. Returns None if it has fewer than ten points, because a fifth of
    them would be a single value."""
    values = [value for _, value in curve if math.isfinite(value)]
    fifth = len(values) // 5
    if fifth < 2:
        return None
    first = values[:fifth]
    last = values[-fifth:]
    error = math.sqrt(variance(first) / fifth + variance(last) / fifth)
    return Trend(fmean(first), fmean(last), (fmean(last) - fmean(first)) / error if error > 0 else None)


def curves_of(run_dir: Path) -> dict[str, Curve]:
    """Returns the curves in a run directory's metrics."""
    found: dict[str, dict[float, float]] = {}
    for line in read_metrics(run_dir):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int | float):
            continue
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                found.setdefault(name, {})[line["step"]] = float(value)
    return {name: sorted(points.items()) for name, points in found.items()}


def _opinions(file: Path) -> list[EvalReport]:
    try:
        return TypeAdapter(list[EvalReport]).validate_json(file.read_text())
    except (OSError, ValidationError):
        return []


def _score(rate: WinRate) -> dict[str, Any]:
    score = {
        "win_rate": rate.win_rate,
        "ci_low": rate.ci_low,
        "ci_high": rate.ci_high,
        "num_questions": rate.num_questions,
    }
    controlled = {"length_controlled": rate.length_controlled, "lc_low": rate.lc_low, "lc_high": rate.lc_high}
    return score | {name: value for name, value in controlled.items() if value is not None}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
