"""The task that does a stage: in a process of its own, with its log relayed and its evidence shown as artifacts.

Call it directly, not with `.submit`: only the main thread sees the signal that cancels a flow, and then ends the stage's processes.
Prefect's result cache is off: a stage is done when its directory says so.
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

from evaluation.summary import StageView, read
from evaluation.tax_report import TAX, TaxReport
from rlhf_core.data.report import MARKDOWN as DATA_REPORT
from rlhf_core.launch import StageFailed, launch
from rlhf_core.stage import RunDir, StageRequest
from rlhf_core.store import Store
from rlhf_core.types import EvalReport, StageResult
from tasks.slots import machine
from tasks.store import bring, keep, states_kept
from tasks.temporary_server import keep_server

RETRIES, RETRY_DELAY_SECONDS = 1, 5
LINES_PER_SECOND = 20


def module_of(kind: str) -> str:
    """The module whose process does stages of this kind."""
    return "evaluation" if kind in ("evaluation", "alignment_tax") else "rlhf_core"


def can_retry(task: Any, task_run: Any, state: Any) -> bool:
    """Another attempt makes sense after a crash, from which the stage resumes; not after wrong input or when it was asked to stop."""
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
    """Does the work of one run directory, or finds that it is done, here or in the store. Raises StageFailed, and StoreFault."""
    logger = get_run_logger()
    run = RunDir(run_dir)
    if store and run.result() is None:
        bring(store, run, request, logger.info)
    if run.result() is not None:
        logger.info("%s is done already: %s", request.name, run.path.name)
        if store:
            keep(store, run, logger.info)
        return "skipped"
    run.prepare(request)
    logger.info("%s starts in %s", request.name, run.path)
    with machine(), states_kept(store, run, logger.warning):
        result = launch(module_of(request.config.stage), run.path, request.name, Throttle(logger.info))
    keep_server()  # what follows asks it
    logger.info("%s is done in %.0f s", request.name, result.seconds)
    show(result, run.path)
    if store:
        keep(store, run, logger.info)
    return "done"


class Throttle:
    """Passes lines on, so many a second at most; says how many it left out (all are in the log file)."""

    def __init__(self, log: Callable[[str], None], per_second: int = LINES_PER_SECOND, clock: Callable[[], float] = time.monotonic):
        self._log, self._per_second, self._clock = log, per_second, clock
        self._start, self._passed, self._left_out = clock(), 0, 0

    def __call__(self, line: str) -> None:
        if not line.strip():
            return
        if self._clock() - self._start >= 1:
            if self._left_out:
                self._log(f"({self._left_out} lines more are in log.txt)")
            self._start, self._passed, self._left_out = self._clock(), 0, 0
        if self._passed < self._per_second:
            self._passed += 1
            self._log(line)
        else:
            self._left_out += 1


def show(result: StageResult, run_dir: Path) -> None:
    """Artifacts of a finished stage: its metrics, its outputs, and the table of an evaluation."""
    key = artifact_key(result.name)
    title = f"{result.name} ({result.stage}, {result.seconds:.0f} s)"
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(result.metrics.items()))
    create_markdown_artifact(f"## {title}\n\n| metric | value |\n|---|---|\n{rows}\n", key=f"{key}-metrics", description=title)
    for name, path in result.outputs.items():
        create_link_artifact(
            (run_dir / path).resolve().as_uri(), link_text=path, key=f"{key}-{artifact_key(name)}", description=f"{name} of {title}"
        )
    if picture := curves(result, run_dir):
        create_image_artifact(picture, key=f"{key}-curves", description=f"curves of {title}")
    if (run_dir / DATA_REPORT).is_file():
        text = (run_dir / DATA_REPORT).read_text()
        create_markdown_artifact(text, key=f"{key}-data", description=f"data of {title}")
    if result.stage == "evaluation":
        report = EvalReport.model_validate_json((run_dir / result.outputs["report"] / "eval.json").read_text())
        create_markdown_artifact(evaluation_table(report), key=f"{key}-win-rates", description=title)
    if result.stage == "alignment_tax":
        tax = TaxReport.model_validate_json((run_dir / result.outputs["report"] / TAX).read_text())
        create_markdown_artifact(tax_table(tax), key=f"{key}-tax", description=title)


def curves(result: StageResult, run_dir: Path) -> str | None:
    """The stage's training curves as the URL of an image that holds its own data; None when it has none."""
    if result.stage in ("evaluation", "alignment_tax", "publication"):
        return None
    from evaluation.curves import Run, stage_chart  # matplotlib takes a second to import

    evidence = read(StageView(result.name, result.stage, (), run_dir, "done"))
    try:
        svg = stage_chart(result.name, result.stage, [Run("", evidence.curves)])
    except Exception:  # a picture is no reason to lose a run
        get_run_logger().exception("the curves of %s could not be drawn", result.name)
        return None
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}" if svg else None


def tax_table(report: TaxReport) -> str:
    """What each model lost on each task's main metric as a markdown table."""
    columns = ("task", "metric", "model", "before", "after", "lost", "95 % interval")
    head = f"Lost against {report.baseline}.\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    rows = [
        f"| {row.task} | {row.metric} | {row.model} | {row.baseline_value:.3f} | {row.value:.3f} | {row.tax:+.3f} "
        f"| {'' if row.ci_low is None else f'{row.ci_low:+.3f} to {row.ci_high:+.3f}'} |"
        for row in report.main
    ]
    return head + "\n".join(rows) + "\n"


def artifact_key(name: str) -> str:
    """As Prefect wants keys: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def evaluation_table(report: EvalReport) -> str:
    """Win rates of all models and judges as a markdown table."""
    head = f"Against {report.baseline}; {report.judge} decides.\n\n| model | judge | win rate | 95 % interval | questions | right |\n"
    rows = [
        f"| {rate.model} | {rate.judge} | {rate.win_rate:.3f} | {rate.ci_low:.3f} - {rate.ci_high:.3f} | {rate.num_questions} "
        f"| {f'{report.right[rate.model]:.3f}' if rate.model in report.right else ''} |"
        for rate in report.win_rates
    ]
    return head + "|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
