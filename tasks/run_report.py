"""Writes the folder of a recipe, `<artifacts>/<recipe name>/`, with its report, at the end of every run,
including failed runs.

`summary.json`, `recipe.yaml` (as it was run) and `run.json` describe the last run. `run.json` has the run
directory, status and gate verdicts of each stage, so that the page can be rewritten after the recipe or its
data has changed. `runs/` has two files per run: its `run.json` with the recipe, and its page.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import Flow, runtime
from prefect.artifacts import create_link_artifact
from prefect.client.schemas.objects import FlowRun, State
from pydantic import TypeAdapter

from evaluation.report.index import write_index
from evaluation.report.summary import StageView, Status, read
from rlhf_core.recipe.gate_checks import GateFailed, gates_of
from rlhf_core.recipe.load_recipe import dump_recipe, recipe_of
from rlhf_core.recipe.named_inputs import beside
from rlhf_core.recipe.plan import Plan
from rlhf_core.runs.run_dir import HOLDER_ENV, LOCK, REQUEST, RunDir
from rlhf_core.runs.run_records import LOCK as RUN_LOCK
from rlhf_core.runs.run_records import NAME, PAGE, RUN, RUNS, RunRecord, RunRequest, asked, new_id
from rlhf_core.system.files import is_locked, locked, read_json, write_text
from rlhf_core.system.machine import disk_problem
from rlhf_core.system.redaction import without_passwords
from tasks.served import recipe_of_run

RECIPE = "recipe.yaml"
MAX_WHY = 500  # characters
# the stages in `run.json`, with run directories relative to the artifacts folder
VIEWS = TypeAdapter(list[StageView])


def this_run(recipe: str) -> RunRecord:
    """Returns the record of a run that starts now. The record's request comes from the command line or from
    the parameters of a deployment's run."""
    started = time.time()
    parameters = runtime.flow_run.parameters or {}
    source = parameters.get("recipe")
    given = asked.get() or RunRequest(
        source if isinstance(source, str) else "", tuple(parameters.get("overrides") or ())
    )
    return RunRecord(
        id=given.id or new_id(started),
        name=given.name or _flow_run_name(),
        recipe=recipe,
        source=without_passwords(given.source),
        overrides=tuple(map(without_passwords, given.overrides)),
        host=socket.gethostname(),
        pid=os.getpid(),
        started=started,
    )


def _flow_run_name() -> str | None:
    """Returns Prefect's name for this run; None outside a run, or if the name is not a valid name for our
    runs."""
    name = runtime.flow_run.name
    return name if name and NAME.fullmatch(name) else None


def record_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Records a flow run that failed before its stages were known, with the reason, for pages and `alignflow
    runs`. This is a Prefect hook. It does nothing for runs that `reported` records, for runs without a
    deployment whose recipe has no folder yet, or when the recipe cannot be read or the record cannot be
    written."""
    began = flow_run.start_time.timestamp() if flow_run.start_time else time.time()
    given = flow_run.parameters or {}
    with suppress(ValueError, OSError):
        recipe = recipe_of_run(
            given.get("recipe"), given.get("overrides"), flow_run.id, flow_run.deployment_id
        )
        folder = Path(recipe.artifacts).absolute() / recipe.name / RUNS
        if flow_run.deployment_id is None and not folder.parent.is_dir():
            return
        known = (read_json(file) for file in folder.glob("*.json") if file.stat().st_mtime >= began - 1)
        if any(run.get("pid") == os.getpid() and run.get("started", 0) >= began - 1 for run in known):
            return
        why = (state.message or "").partition("encountered an exception: ")[2].strip().partition("\n")[
            0
        ] or "it failed"
        told = disk_problem(OSError(why))
        if told:
            why = f"{folder.parents[1]} or an inbox cannot be written to: {told}, then run again ({why})"
        run = this_run(recipe.name).model_copy(
            update={"state": "failed", "why": without_passwords(why)[:MAX_WHY], "ended": time.time()}
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_text(
            folder / f"{run.id}.json", run.model_dump_json(exclude={"file", "id", "pinned"}, indent=2) + "\n"
        )


@contextmanager
def reported(plan: Plan) -> Iterator[dict[str, Status]]:
    """Yields the status of every stage, which the block updates. Writes the report after the block, even
    when it raises."""
    statuses: dict[str, Status] = {node.name: found(node.run_dir) for node in plan.nodes}
    run = this_run(plan.recipe.name)
    lock = plan.folder / RUNS / f"{run.id}{RUN_LOCK}"
    with ExitStack() as ends:
        ends.callback(lock.unlink, missing_ok=True)
        ends.enter_context(locked(lock))
        os.environ[HOLDER_ENV] = f"run {run.label} of {plan.recipe.name}, process {os.getpid()},"
        ends.callback(os.environ.pop, HOLDER_ENV)
        # early, so that `alignflow gc` keeps the stages of a run in progress
        record(plan, views_of(plan, statuses), run)
        try:
            yield statuses
        except BaseException as error:
            state = "gate failed" if isinstance(error, GateFailed) else "failed"
            if not isinstance(error, Exception):
                state = "interrupted"
            try:
                write_or_tell(plan, statuses, run, state)
            except Exception:  # this must not replace the exception that ended the run
                logging.getLogger(__name__).exception(
                    "the report of %s could not be written", plan.recipe.name
                )
            raise
        waits = any(verdict.waits for node in plan.nodes for verdict in gates_of(node))
        page = write_or_tell(plan, statuses, run, "waits" if waits else "done")
    if page:
        create_link_artifact(
            page.as_uri(), link_text=page.name, key="report", description=f"report of {plan.recipe.name}"
        )


def write_or_tell(plan: Plan, statuses: dict[str, Status], run: RunRecord, state: str) -> Path | None:
    """Like `write`, but if the disk cannot be written to, logs one sentence and returns None, because a
    missing page does not affect the stages."""
    try:
        return write(plan, statuses, run, state)
    except Exception as error:
        problem = disk_problem(error)
        if problem is None:
            raise
        place = getattr(error, "filename", None) or plan.folder
        told = (
            "the page was not written because %s cannot be written to: %s, then write the page with"
            " `alignflow report %s`; the stages' results are kept"
        )
        logging.getLogger(__name__).error(told, place, problem, plan.folder)
    with suppress(OSError):
        record(plan, views_of(plan, statuses), run, state, time.time())
    return None


def write(plan: Plan, statuses: dict[str, Status], run: RunRecord | None = None, state: str = "") -> Path:
    """Writes the recipe's folder and the page of all runs. Returns the path of the recipe's page.

    `run`: the run that ends now, in `state`. If it is None, writes only the pages and keeps `run.json`, which
    `alignflow gc` reads.
    """
    views = views_of(plan, statuses)
    if run:
        record(plan, views, run)
    plan.folder.mkdir(parents=True, exist_ok=True)
    from evaluation.report.run_page import in_subfolder, write_report  # imports matplotlib: a second

    page = write_report(plan.folder, plan.recipe.name, views, run.heading if run else _heading(plan.folder))
    if run:
        write_text(plan.folder / RUNS / f"{run.id}{PAGE}", in_subfolder(page.read_text()))
        record(plan, views, run, state, time.time())
    write_index(plan.artifacts)
    return page


def views_of(plan: Plan, statuses: dict[str, Status]) -> list[StageView]:
    """Returns the stages of a plan as records for the report."""
    return [
        StageView(node.name, node.kind, node.parents, node.run_dir, statuses[node.name], gates_of(node))
        for node in plan.nodes
    ]


def record(
    plan: Plan, views: list[StageView], run: RunRecord, state: str = "", ended: float | None = None
) -> None:
    """Writes the recipe, `run.json`, and the run's own file in `runs/` (runs/run_records.py), which later
    runs do not change."""
    (plan.folder / RUNS).mkdir(parents=True, exist_ok=True)
    write_text(
        plan.folder / RECIPE, dump_recipe(recipe_of(beside(plan.recipe, Path.cwd(), absolute=True)[0]))
    )
    relative = [replace(view, run_dir=view.run_dir.relative_to(plan.artifacts)) for view in views]
    entry = run.model_dump(mode="json", exclude={"file", "id", "pinned"})
    entry |= {"state": state, "ended": ended, "stages": VIEWS.dump_python(relative, mode="json")}
    write_text(
        plan.folder / RUNS / f"{run.id}.json",
        json.dumps(entry | {"config": plan.recipe.model_dump(mode="json")}, indent=2) + "\n",
    )
    write_text(plan.folder / RUN, json.dumps({"id": run.id} | entry, indent=2) + "\n")


def rewrite(folder: Path) -> Path:
    """Rewrites the page of a recipe's folder from its stages' run directories. Returns its path.

    Raises ValueError when the folder has no readable `run.json`.
    """
    artifacts = folder.absolute().parent
    try:
        recipe, views = _recorded(folder / RUN, artifacts)
    except (OSError, ValueError, LookupError, TypeError):
        why = (
            f"its {RUN} is damaged"
            if (folder / RUN).is_file()
            else (f"it has no {RUN}, so it is not the folder of a run")
        )
        raise ValueError(
            f"{folder}: {why}: give a recipe, the folder <artifacts>/<recipe> of one that has run, or"
            " <artifacts>"
        ) from None
    from evaluation.report.run_page import write_report

    page = write_report(folder, recipe, views, _heading(folder))
    write_index(artifacts)
    return page


def rewrite_run(file: Path) -> Path:
    """Rewrites the page of a run from its record in `runs/`. Returns its path. Raises ValueError when the
    record is damaged."""
    artifacts = file.absolute().parents[2]
    try:
        recipe, views = _recorded(file, artifacts)
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(
            f"{file} cannot be read or names no stages: restore it, or give another run"
        ) from None
    from evaluation.report.run_page import in_subfolder, render, rollout_pages

    page = file.with_suffix(PAGE)
    run = RunRecord.model_validate(read_json(file) | {"id": file.stem})
    pages = rollout_pages(file.parents[1], views)
    write_text(page, in_subfolder(render(recipe, [read(view) for view in views], run.heading, pages)))
    write_index(artifacts)
    return page


def _heading(folder: Path) -> str:
    """Returns the heading of a recipe's last run; "" if the run's record has no heading."""
    try:
        return RunRecord.model_validate(read_json(folder / RUN)).heading
    except ValueError:
        return ""


def _recorded(file: Path, artifacts: Path) -> tuple[str, list[StageView]]:
    """Returns the recipe's name and the stages in a run's record."""
    run = json.loads(file.read_text())
    return run["recipe"], [
        replace(view, run_dir=artifacts / view.run_dir) for view in VIEWS.validate_python(run["stages"])
    ]


def statuses_of(folder: Path) -> dict[str, str]:
    """Returns the status of each stage in a recipe's last run; {} if there was none."""
    return {s["name"]: s["status"] for s in read_json(folder / RUN).get("stages", [])}


def found(run_dir: Path) -> Status:
    """Returns a stage's status from its run directory alone."""
    run = RunDir(run_dir)
    if run.result() is not None:
        return "done"
    if is_locked(run / LOCK):
        return "running"
    return "failed" if (run / REQUEST).exists() else "not run"
