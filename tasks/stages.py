"""Runs a stage as a Prefect task: in its own process, with its log forwarded and its results shown as
artifacts.

The task is called directly, or submitted to the flow's task runner, whose threads run stages at the same
time. Only the main thread receives the signal that cancels a flow. Code that waits in another thread calls
`check_stop` (rlhf_core/runs/allotment.py), and ends the stage's processes when that raises. Prefect's result
cache is off, because a stage is done when its run directory has a complete `result.json`.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from evaluation.alignment_tax.tax_report import TAX, TaxReport
from evaluation.calibration.calibration_report import CALIBRATION, CalibrationReport, calibration_tables
from evaluation.regression.regression_report import REGRESSION, RegressionReport, regression_table
from evaluation.report.summary import curves_of
from rlhf_core.config import KINDS
from rlhf_core.data.data_report import MARKDOWN as DATA_REPORT
from rlhf_core.recipe.digest import content_now
from rlhf_core.records import EvalReport, StageResult
from rlhf_core.runs.allotment import check_stop, variables
from rlhf_core.runs.launch import StageFailed, launch
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import RunDir, StageRequest
from rlhf_core.system.files import Digests
from rlhf_core.system.markdown_table import table
from rlhf_core.system.processes import WRONG_INPUT
from tasks.slots import machine
from tasks.stored_stages import fetch_stage, states_uploaded, upload_stage
from tasks.temporary_server import keep_server

RETRIES = 1
RETRY_DELAY_SECONDS = 5
LINES_PER_SECOND = 20


def can_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Returns whether Prefect should retry a task: after a crash, because the stage resumes, but not after
    wrong input or a stop signal."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.can_retry


@task(
    name="stage",
    task_run_name="{request.name}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_SECONDS,
    retry_condition_fn=can_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def run_stage(request: StageRequest, run_dir: Path, store: Store | None = None) -> Literal["done", "skipped"]:
    """Runs one stage, unless it is already done here or in the store, and copies its result to the store.
    Returns whether the stage was run (`done`) or not (`skipped`). Waits while another run works on the stage.

    Raises StageFailed when its process ends without a result or an input has changed (see
    `require_unchanged`), StoreFault when the store cannot be used, MachineLacks for the same reasons as
    `RunDir.wait`, and Stopped for the same reasons as `check_stop`.
    """
    check_stop()  # a retry starts here, seconds after the crash
    logger = get_run_logger()
    run = RunDir(run_dir)
    run.wait(request.name, logger.info)
    if store and run.result() is None:
        fetch_stage(store, run, request, logger.info)
    if run.result() is not None:
        logger.info("%s is already done: %s", request.name, run.path.name)
        if store:
            upload_stage(store, run, logger.info)
        return "skipped"
    require_unchanged(request, Digests(run.artifacts))
    run.prepare(request)
    gpus = variables().get("CUDA_VISIBLE_DEVICES")
    logger.info("%s starts in %s%s", request.name, run.path, f" on GPU {gpus}" if gpus else "")
    with machine(), states_uploaded(store, run, logger.warning):
        result = launch(KINDS[request.config.stage].package, run.path, request.name, Throttle(logger.info))
    keep_server()  # the next lines send requests to the server
    logger.info("%s is done in %.0f s", request.name, result.seconds)
    show(result, run.path)
    if store:
        upload_stage(store, run, logger.info)
    return "done"


def require_unchanged(request: StageRequest, digests: Digests) -> None:
    """Raises StageFailed when a file that determines the result has changed since the run was planned and its
    directory was named. Otherwise the stage would continue from a resume state with different data, or its
    result would be taken for the result of the old file."""
    changed = [path for path, content in request.contents.items() if content_now(path, digests) != content]
    if changed:
        told = (
            f"{', '.join(changed)}: changed since the run was planned: run again, and the stage gets a new"
            " directory"
        )
        raise StageFailed(request.name, WRONG_INPUT, (told,))


class Throttle:
    """Forwards at most LINES_PER_SECOND lines per second, and logs how many it dropped (the log file has all
    lines)."""

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._start = time.monotonic()
        self._passed = 0
        self._left_out = 0

    def __call__(self, line: str) -> None:
        if not line.strip():
            return
        if time.monotonic() - self._start >= 1:
            if self._left_out:
                self._log(f"({self._left_out} more lines are in log.txt)")
            self._start = time.monotonic()
            self._passed = 0
            self._left_out = 0
        if self._passed < LINES_PER_SECOND:
            self._passed += 1
            self._log(line)
        else:
            self._left_out += 1


def show(result: StageResult, run_dir: Path) -> None:
    """Creates the Prefect artifacts of a finished stage: metrics, outputs, curves, data report and evaluation
    tables."""
    key = artifact_key(result.name)
    title = f"{result.name} ({result.stage}, {result.seconds:.0f} s)"
    texts = {"metrics": f"## {title}\n\n{table(('metric', 'value'), sorted(result.metrics.items()))}"}
    if (run_dir / DATA_REPORT).is_file():
        texts["data"] = (run_dir / DATA_REPORT).read_text()
    if "report" in result.outputs:
        report = EvalReport.read(run_dir / result.outputs["report"] / "eval.json")
        if report:
            texts["win-rates"] = evaluation_table(report)
        tax = TaxReport.read(run_dir / result.outputs["report"] / TAX)
        if tax:
            texts["tax"] = tax_table(tax)
        regression = RegressionReport.read(run_dir / result.outputs["report"] / REGRESSION)
        if regression:
            texts["regression"] = regression_table(regression)
        calibration = CalibrationReport.read(run_dir / result.outputs["report"] / CALIBRATION)
        if calibration:
            texts["calibration"] = calibration_tables(calibration)
    for name, text in texts.items():
        create_markdown_artifact(text, key=f"{key}-{name}", description=f"{name} of {title}")
    for name, path in result.outputs.items():
        create_link_artifact(
            (run_dir / path).resolve().as_uri(),
            link_text=path,
            key=f"{key}-{artifact_key(name)}",
            description=f"{name} of {title}",
        )
    picture = curves(result, run_dir)
    if picture:
        create_image_artifact(picture, key=f"{key}-curves", description=f"curves of {title}")


def curves(result: StageResult, run_dir: Path) -> str | None:
    """Returns the stage's training curves as a data URL; None if it has no curves."""
    if KINDS[result.stage].charts is None:
        return None
    from evaluation.report.drawing.charts import StageCurves, stage_chart

    try:
        svg = stage_chart(result.name, result.stage, [StageCurves("", curves_of(run_dir))])
    except Exception:  # an error in a chart must not fail the run
        get_run_logger().exception("the curves of %s could not be drawn", result.name)
        return None
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}" if svg else None


def tax_table(report: TaxReport) -> str:
    """Returns each model's loss on each task's main metric as a markdown table."""
    rows = []
    for row in report.main:
        interval = None if row.ci_low is None else f"{row.ci_low:+.3f} to {row.ci_high:+.3f}"
        rows.append(
            (
                row.task,
                row.metric,
                row.model,
                f"{row.baseline_value:.3f}",
                f"{row.value:.3f}",
                f"{row.tax:+.3f}",
                interval,
            )
        )
    header = ("task", "metric", "model", "before", "after", "lost", "95 % interval")
    return f"Lost against {report.baseline}.\n\n{table(header, rows)}"


def artifact_key(name: str) -> str:
    """Returns a valid key for a Prefect artifact: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def evaluation_table(report: EvalReport) -> str:
    """Returns the win rates of a report as a markdown table."""
    rows = []
    for rate in report.win_rates:
        won = f"{rate.win_rate:.3f}"
        interval = f"{rate.ci_low:.3f} - {rate.ci_high:.3f}"
        right = report.right.get(rate.model)
        rows.append(
            (rate.model, rate.judge, won, interval, rate.counted, None if right is None else f"{right:.3f}")
        )
    header = ("model", "judge", "win rate", "95 % interval", "counted", "right")
    return (
        f"Against {report.baseline}; {report.judge} decides; a tie counts as half a"
        f" win.\n\n{table(header, rows)}"
    )
