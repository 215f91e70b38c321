"""Writes the folder of a recipe, `<artifacts>/<recipe name>/`, with its report, at the end of every run, also of a failed one.

`summary.json`, `recipe.yaml` (as it was run) and `run.json` describe the last run. `run.json` has the run directory, status and gate
verdicts of each stage: from it the page can be written again after the recipe or its data changed. `runs/` has a file for each run: its
`run.json` with the recipe.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from prefect.artifacts import create_link_artifact
from pydantic import TypeAdapter

from evaluation.report.index import write_index
from evaluation.report.summary import StageView, Status
from rlhf_core.recipe.gates import gates_of
from rlhf_core.recipe.load import dump_recipe
from rlhf_core.recipe.plan import Plan
from rlhf_core.runs.run_dir import HOLDER_ENV, LOCK, REQUEST, RunDir
from rlhf_core.system.files import digest, is_locked, read_json, write_text

RECIPE, RUN, RUNS = "recipe.yaml", "run.json", "runs"
VIEWS = TypeAdapter(list[StageView])  # the stages in `run.json`, with run directories relative to the artifacts


@contextmanager
def reported(plan: Plan) -> Iterator[dict[str, Status]]:
    """Yields the status of every stage, which the block updates, and writes the report after the block, also when it raises."""
    statuses: dict[str, Status] = {node.name: found(node.run_dir) for node in plan.nodes}
    started = time.time()
    os.environ[HOLDER_ENV] = f"run {plan.recipe.name}, process {os.getpid()},"
    record(plan, views_of(plan, statuses), started)  # so that `alignflow gc` keeps the stages of a run in progress
    try:
        yield statuses
    except BaseException:
        try:
            write(plan, statuses, started)
        except Exception:  # must not replace the exception that ended the run
            logging.getLogger(__name__).exception("the report of %s could not be written", plan.recipe.name)
        raise
    finally:
        del os.environ[HOLDER_ENV]
    page = write(plan, statuses, started)
    create_link_artifact(page.as_uri(), link_text=page.name, key="report", description=f"report of {plan.recipe.name}")


def write(plan: Plan, statuses: dict[str, Status], started: float | None = None) -> Path:
    """Writes the recipe's folder, and the page over all runs. Returns the page's path.

    `started`: start of the run that ends now; None: writes the pages only and keeps `run.json`, which `alignflow gc` reads.
    """
    views = views_of(plan, statuses)
    if started:
        record(plan, views, started)
    plan.folder.mkdir(parents=True, exist_ok=True)
    from evaluation.report.page import write_report  # imports matplotlib, which takes a second

    page = write_report(plan.folder, plan.recipe.name, views)
    if started:
        record(plan, views, started, time.time())
    write_index(plan.artifacts)
    return page


def views_of(plan: Plan, statuses: dict[str, Status]) -> list[StageView]:
    """Returns the stages of a plan as records of the report."""
    return [StageView(node.name, node.kind, node.parents, node.run_dir, statuses[node.name], gates_of(node)) for node in plan.nodes]


def record(plan: Plan, views: list[StageView], started: float, ended: float | None = None) -> None:
    """Writes the recipe, `run.json`, and the run's own file in `runs/`, which `alignflow gc` reads and later runs do not change.

    `started`, `ended`: seconds since 1970.
    """
    (plan.folder / RUNS).mkdir(parents=True, exist_ok=True)
    write_text(plan.folder / RECIPE, dump_recipe(plan.recipe))
    relative = [replace(view, run_dir=view.run_dir.relative_to(plan.artifacts)) for view in views]
    stages = VIEWS.dump_python(relative, mode="json")
    run = {"recipe": plan.recipe.name, "started": started, "ended": ended, "stages": stages}
    directories = digest([stage["run_dir"] for stage in stages])
    name = f"{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S-%f}-{directories[:8]}.json"
    write_text(plan.folder / RUNS / name, json.dumps(run | {"config": plan.recipe.model_dump(mode="json")}, indent=2) + "\n")
    write_text(plan.folder / RUN, json.dumps(run, indent=2) + "\n")


def rewrite(folder: Path) -> Path:
    """Writes the page of a recipe's folder again from its stages' run directories. Returns its path.

    Raises ValueError when the folder has no readable `run.json`.
    """
    artifacts = folder.absolute().parent
    try:
        run = json.loads((folder / RUN).read_text())
        views = [replace(view, run_dir=artifacts / view.run_dir) for view in VIEWS.validate_python(run["stages"])]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{folder} has no {RUN} that can be read: give a recipe, or the folder <artifacts>/<recipe> of a run") from None
    from evaluation.report.page import write_report

    page = write_report(folder, run["recipe"], views)
    write_index(artifacts)
    return page


def statuses_of(folder: Path) -> dict[str, str]:
    """Returns the status of each stage in the last run of a recipe; {} when there was none."""
    return {s["name"]: s["status"] for s in read_json(folder / RUN).get("stages", [])}


def found(run_dir: Path) -> Status:
    """Returns a stage's status from its run directory alone."""
    run = RunDir(run_dir)
    if run.result() is not None:
        return "done"
    if is_locked(run / LOCK):
        return "running"
    return "failed" if (run / REQUEST).exists() else "not run"
