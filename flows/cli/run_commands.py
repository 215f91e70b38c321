"""Commands that run stages: `alignflow run` and `alignflow stage`. They import Prefect only when needed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from flows.cli.dry_run import outlook
from flows.cli.show import OK, TERMINATED, Override, RecipePlace, Whole, console, show_pins, show_plan
from flows.cli.terminal.live import Say, live_view, working
from flows.running import prepare_first
from rlhf_core.preflight.inputs import load_here, require_here
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.prepared import prepared as prepared_stage
from rlhf_core.runs.run_dir import KEPT_FOLDER
from rlhf_core.runs.run_records import RunRequest, asked, check_name, new_id
from rlhf_core.system import orphan_watcher
from rlhf_core.system.machine import MachineLacks
from rlhf_core.system.proxies import proxy_of
from tasks.run_log import without_tracebacks
from tasks.server_process import ours, prepared


def run(
    recipe: RecipePlace,
    *overrides: Override,
    name: str | None = None,
    dry_run: bool = False,
    latest: bool = False,
    jobs: Whole | None = None,
    plain: bool = False,
) -> int:
    """Run all stages of a recipe that are not done yet.

    Args:
        name: name of the run, for `alignflow runs`; if several runs share a name, it means the newest.
        dry_run: only show the stages, which of them would be skipped, and why.
        latest: look up branches and tags on the Hub again, unless the last run of this recipe is unfinished.
        jobs: run up to this many independent stages at once; overrides the recipe's side_by_side.
        plain: print the log instead of live lines, as when the output is not a terminal.
    """
    check_name(name)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs}: give 1 or more stages")
    overrides = overrides if jobs is None else (*overrides, f"side_by_side={jobs}")
    with working("reading the recipe and its inputs", plain):
        loaded = load_recipe(recipe, overrides) if dry_run else load_here(recipe, overrides)
        if latest and not dry_run:
            from flows.alignment import refresh_hub_revisions

            refresh_hub_revisions(loaded)
        planned = plan(loaded)
    show_pins(planned)
    if dry_run:
        show_plan(console, planned, outlook(planned))
        return OK

    def check() -> None:
        require_here(planned, planned.nodes)

    def flow() -> None:
        from flows.alignment import checked_flow

        checked_flow("alignment", planned, planned.nodes)(planned.recipe)

    return _run(planned, planned.nodes, RunRequest(recipe, overrides, name), plain, check, flow)


def stage(
    name: str,
    recipe: RecipePlace,
    *overrides: Override,
    plain: bool = False,
    train_only: Path | None = None,
    rollouts_only: bool = False,
) -> int:
    """Run one stage of a recipe and nothing else; its parents must be done. The name of a loop runs all of
    its stages.

    Args:
        name: name of the stage, as `alignflow run RECIPE --dry-run` shows it.
        plain: print the log instead of live lines, as when the output is not a terminal.
        train_only: for debugging ppo: train, without engines, on the rollouts kept in this run directory or
            folder.
        rollouts_only: for debugging ppo: keep rollouts, do not train.
    """
    if train_only is not None:
        overrides = (*overrides, f"{name}.train_only={json.dumps(str(_kept_in(train_only)))}")
    if rollouts_only:
        overrides = (*overrides, f"{name}.rollouts_only=true")
    with working("reading the recipe and its inputs", plain):
        planned = plan(load_here(recipe, overrides))
    nodes = planned.stages_of(name)

    def check() -> None:
        from flows.alignment import require_parents
        from tasks.stored_stages import fetch_parents

        fetch_parents(planned, nodes)
        require_parents(planned, nodes)
        require_here(planned, nodes)

    def flow() -> None:
        from flows.alignment import checked_flow

        checked_flow("stage", planned, nodes)(planned.recipe, name)

    return _run(planned, nodes, RunRequest(recipe, overrides), plain, check, flow)


def _kept_in(place: Path) -> Path:
    """Returns the folder of kept rollouts: `place` itself or, if `place` is a run directory, the folder in
    it. Raises ValueError if there are none."""
    inner = place / KEPT_FOLDER
    folder = (inner if inner.is_dir() else place).absolute()
    if not (folder / "iteration1.jsonl").is_file():
        raise ValueError(
            f"--train-only {place}: iteration1.jsonl is missing: give the directory of a run with"
            " keep_rollouts: true or --rollouts-only"
        )
    return folder


@contextmanager
def _server_loading() -> Iterator[None]:
    """Starts Prefect's temporary server in the background while the block checks and imports. Child processes
    always end with this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    orphan_watcher.start()
    with prepared():
        yield


def _run(
    planned: Plan,
    nodes: tuple[Node, ...],
    given: RunRequest,
    plain: bool,
    check: Callable[[], None],
    flow: Callable[[], None],
) -> int:
    """Runs a flow and shows its progress and outcome. `check` runs first and raises if something is
    missing."""
    given = given._replace(id=new_id(time.time()))
    begun = False
    try:
        with live_view(planned, nodes, given.id, plain) as say, _server_loading():
            say("checking the inputs and this machine")
            check()
            prepare_first(planned, nodes)
            say("importing Prefect")
            import flows.alignment  # noqa: F401

            begun = True
            _flow(given, flow, say)
    finally:
        prepared_stage.end()
        if begun:
            from flows.cli.terminal.ending import show_end
            from tasks.run_report import statuses_of

            show_end(console, planned, statuses_of(planned.folder))
    return OK


def _flow(given: RunRequest, flow: Callable[[], None], say: Say) -> None:
    """Runs a flow with its Prefect server. Raises MachineLacks when the server does not answer."""
    from tasks.temporary_server import start_server, without_heartbeats

    without_tracebacks()
    named = os.environ.get("PREFECT_API_URL", "an address of its own")
    other = asked.set(given)
    try:
        say("starting Prefect's server")
        start_server()
        say("")
        with without_heartbeats():
            flow()
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):
            raise
        if ours.begun:
            gone = f"Prefect's temporary server ended and could not be restarted ({error})"
            raise MachineLacks(f"{gone}: run this again; finished stages stay finished") from error
        raise MachineLacks(
            f"no Prefect server answers ({error}{_proxy()}): start it, or unset PREFECT_API_URL to use a"
            " temporary one"
        ) from error
    except httpx.HTTPError as error:
        where = f"Prefect's server at {named}"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401:
            raise MachineLacks(
                f"{where} does not accept this shell's auth string: set PREFECT_API_AUTH_STRING (for"
                " `alignflow serve`: to the content of the file auth-string in its home)"
            ) from error
        raise MachineLacks(
            f"{where} stopped answering ({error}{_proxy()}): start it again and run this again; finished"
            " stages stay finished"
        ) from error
    finally:
        asked.reset(other)


def _proxy() -> str:
    """Returns a phrase that ends a sentence by naming the proxy of requests to Prefect's API."""
    from prefect.settings import PREFECT_API_URL

    return proxy_of(PREFECT_API_URL.value() or "")
