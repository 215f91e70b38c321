"""The folder of a recipe, `<artifacts>/<recipe name>/`: its report, written at the end of every run, also of one that failed.

Beside the page and `summary.json` it holds `recipe.yaml`, as it was run, and `run.json`: which directories belong to it and what
happened to them (also at their gates), so that the page can be drawn again later, also after the recipe or its data changed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.artifacts import create_link_artifact

from evaluation.index import write_index
from evaluation.summary import StageView, Status
from rlhf_core.config.gates import Verdict
from rlhf_core.gates import gates_of
from rlhf_core.plan import Plan
from rlhf_core.recipe import dump_recipe
from rlhf_core.stage import REQUEST, RunDir, read_json, write_text

RECIPE, RUN = "recipe.yaml", "run.json"


@contextmanager
def reported(plan: Plan) -> Iterator[dict[str, Status]]:
    """Yields the status of every stage, to be kept up to date, and writes the report however the block ends."""
    statuses: dict[str, Status] = {node.name: found(node.run_dir) for node in plan.nodes}
    started = time.time()
    record(plan, views_of(plan, statuses), started)  # now already: nothing else says which stages a run in progress needs
    try:
        yield statuses
    except BaseException:
        try:
            write(plan, statuses, started)
        except Exception:  # must not hide what ended the run
            logging.getLogger(__name__).exception("the report of %s could not be written", plan.recipe.name)
        raise
    page = write(plan, statuses, started)
    create_link_artifact(page.as_uri(), link_text=page.name, key="report", description=f"report of {plan.recipe.name}")


def write(plan: Plan, statuses: dict[str, Status], started: float | None = None) -> Path:
    """Writes the recipe's folder, and the page over all runs. Returns the page's path. `started`: when the run began that ends here."""
    views = views_of(plan, statuses)
    if started:  # else the page alone is drawn: what the last run used, `gc` is to know
        record(plan, views, started)
    plan.folder.mkdir(parents=True, exist_ok=True)
    from evaluation.page import write_report  # draws with matplotlib: a second and more to import, not needed before the end

    page = write_report(plan.folder, plan.recipe.name, views)
    if started:
        record(plan, views, started, time.time())
    write_index(plan.artifacts)
    return page


def views_of(plan: Plan, statuses: dict[str, Status]) -> list[StageView]:
    """The stages as a report sees them."""
    return [StageView(node.name, node.kind, node.parents, node.run_dir, statuses[node.name], gates_of(node)) for node in plan.nodes]


def record(plan: Plan, views: list[StageView], started: float | None = None, ended: float | None = None) -> None:
    """Writes the recipe, which directories belong to it, and when the run began and ended (seconds since 1970; None: as it stood)."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_text(plan.folder / RECIPE, dump_recipe(plan.recipe))
    stages = [
        {
            "name": v.name,
            "kind": v.kind,
            "parents": v.parents,
            "run_dir": v.run_dir.relative_to(plan.artifacts).as_posix(),
            "status": v.status,
            "gates": [verdict.model_dump(mode="json") for verdict in v.gates],
        }
        for v in views
    ]
    times = {"started": started, "ended": ended} if started else _times(plan.folder)
    write_text(plan.folder / RUN, json.dumps({"recipe": plan.recipe.name, **times, "stages": stages}, indent=2) + "\n")


def _times(folder: Path) -> dict[str, float | None]:
    run = read_json(folder / RUN)
    return {name: run.get(name) for name in ("started", "ended")}


def rewrite(folder: Path) -> Path:
    """Draws the page of a recipe's folder again from what its stages left behind. ValueError when it is no such folder."""
    try:
        run = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        raise ValueError(f"{folder} has no {RUN}: give a recipe, or the folder <artifacts>/<recipe name> of a run") from None
    from evaluation.page import write_report

    views = [
        StageView(
            s["name"],
            s["kind"],
            tuple(s["parents"]),
            folder.absolute().parent / s["run_dir"],
            s["status"],
            tuple(Verdict.model_validate(verdict) for verdict in s.get("gates", ())),
        )
        for s in run["stages"]
    ]
    page = write_report(folder, run["recipe"], views)
    write_index(folder.absolute().parent)
    return page


def statuses_of(folder: Path) -> dict[str, str]:
    """What the last run of a recipe did with each stage; {} when there was none."""
    return {s["name"]: s["status"] for s in read_json(folder / RUN).get("stages", [])}


def found(run_dir: Path) -> Status:
    """A stage's status as its directory alone tells it."""
    run = RunDir(run_dir)
    if run.result() is not None:
        return "done"
    return "failed" if (run / REQUEST).exists() else "not run"
