"""Defines the flows `alignment` (a whole recipe) and `stage` (one of its stages). Read this file first, then
loops.py and parts.py.

Each stage runs in its own process, in a directory named after the digest of its configuration and inputs. A
finished stage is skipped. Stages that do not depend on each other run at the same time if the machine allows
it. schedule.py selects the stages, and running.py runs them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prefect import runtime
from prefect.utilities.names import generate_slug

from evaluation.report.summary import Status
from flows.running import OneByOne, Threads, prepare_next
from flows.schedule import Schedule, machine_here, schedule_of
from rlhf_core.config import KINDS, Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.hub.revisions import forget
from rlhf_core.preflight.inputs import require_here
from rlhf_core.recipe.gate_checks import GateFailed, gates_behind, holding, uncheckable
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.launch import SeveralFailed
from rlhf_core.runs.prepared import prepared
from rlhf_core.runs.remote.store import store_of
from rlhf_core.runs.run_dir import StageRequest
from rlhf_core.runs.run_records import asked
from rlhf_core.system import orphan_watcher
from tasks.decisions.approval import ask_about, await_approvals
from tasks.decisions.champion import promote_published, roll_back
from tasks.decisions.gate_decisions import check_gates
from tasks.keys import provided, variables
from tasks.notify import notify_gates, notify_stage, notify_state
from tasks.run_report import found, record_failure, reported, statuses_of
from tasks.served import recipe_of_run
from tasks.stages import run_stage
from tasks.stored_stages import fetch_parents
from tasks.temporary_server import OwnServerFlow

MAX_RECIPE_NAME = 36  # characters of the recipe's name in a run's name, which has at most 64


def run_name() -> str:
    """Returns the name of a flow run: the requested name, or else the name of its recipe (or the recipe's
    file) followed by two random words."""
    given = asked.get()
    if given is not None and given.name:
        return given.name
    return f"{_recipe_name()[:MAX_RECIPE_NAME]}-{generate_slug(2)}"


def _recipe_name() -> str:
    recipe = runtime.flow_run.parameters.get("recipe")
    if isinstance(recipe, dict):
        return str(recipe.get("name"))
    return recipe.name if isinstance(recipe, Recipe) else Path(str(recipe)).stem


# Arguments of every flow. The hooks send a run's states to the recipe's webhook and record a run that fails
# before it has stages. Prefect does not validate parameters: `recipe_of_run` does, with shorter messages.
HOOKS: dict[str, Any] = {
    hook: [notify_state]
    for hook in ("on_running", "on_completion", "on_failure", "on_crashed", "on_cancellation")
}
HOOKS["on_failure"] = [notify_state, record_failure]
flow: Any = partial(
    OwnServerFlow, flow_run_name=run_name, persist_result=False, validate_parameters=False, **HOOKS
)


@flow
def alignment(recipe: Recipe | str, overrides: tuple[str, ...] = (), latest: bool = False) -> None:
    """Runs all stages of a recipe (a path, URI, or Recipe), parents first, and writes its report. `latest`:
    see `refresh_hub_revisions`."""
    loaded = recipe_of_run(recipe, overrides, runtime.flow_run.id, runtime.deployment.id)
    require_type("latest", latest, bool)
    if latest:
        refresh_hub_revisions(loaded)
    with provided(variables(loaded)):
        planned = plan(loaded)
        run_all(planned, planned.nodes)


@flow
def stage(recipe: Recipe | str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """Runs one stage of a recipe (or the stages of one loop or round) and no others."""
    loaded = recipe_of_run(recipe, overrides, runtime.flow_run.id, runtime.deployment.id)
    require_type("name", name, str)
    with provided(variables(loaded)):
        planned = plan(loaded)
        nodes = planned.stages_of(name)
        fetch_parents(planned, nodes)
        require_parents(planned, nodes)
        run_all(planned, nodes)


def checked_flow(flow_name: str, planned: Plan, nodes: tuple[Node, ...]) -> Any:
    """Returns a flow that runs stages of a plan that has already been checked on this machine. Call the flow
    with the plan's recipe, which Prefect displays; the flow `stage` also takes the name of the stage."""

    def run_checked(recipe: Recipe, name: str | None = None, overrides: tuple[str, ...] = ()) -> None:
        with provided(variables(planned.recipe)):
            run_all(planned, nodes, checked=True)

    return flow(run_checked, name=flow_name)


def require_type(name: str, value: object, *kinds: type | None) -> None:
    """Raises ValueError when the type of a flow's parameter is not in `kinds`; None among them makes the
    parameter optional."""
    if not (value is None and None in kinds) and type(value) not in kinds:
        wanted = " or ".join("nothing" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"parameter {name}: give {wanted}, not {str(value)[:60]!r}")


def refresh_hub_revisions(recipe: Recipe) -> None:
    """Removes the saved commits of the recipe's Hub branches and tags, unless its last run is unfinished
    and will resume with them."""
    folder = Path(recipe.artifacts).absolute() / recipe.name
    if all(status in ("done", "skipped") for status in statuses_of(folder).values()):
        forget(folder)


def run_all(planned: Plan, nodes: tuple[Node, ...], checked: bool = False) -> None:
    """Runs stages, each once its parents are done and their gates have passed. `flows/schedule.py` decides
    which stages run at the same time. `checked`: whether inputs and machine have already been checked.

    Raises ValueError or MachineLacks before any work, StageFailed when a stage fails, GateFailed when a
    failed gate stopped other stages, and SeveralFailed for more than one of these errors. After a failure no
    further stage starts, but stages that are already running finish. Raises ApprovalAwaited, or suspends the
    run, when all remaining stages wait for a person (tasks/decisions/approval.py).
    """
    if not checked:
        require_here(planned, nodes)
    # a worker started this process, and the run must not outlive that worker
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        orphan_watcher.end_with_parent(signal.SIGTERM)
    while waiting := _run_open(planned, nodes):
        await_approvals(planned, waiting)


def _run_open(planned: Plan, nodes: tuple[Node, ...]) -> list[Verdict]:
    """Runs the stages that need no decision by a person, and returns the gates that wait for one."""
    schedule = schedule_of(planned, nodes, machine_here())
    with reported(planned) as statuses:
        stages = OpenStages(planned, nodes, schedule, statuses)
        stages.pass_ancestors()
        stages.run_each()
        stages.act_on_gates()
        stages.raise_failures()
    return stages.waiting


class OpenStages:
    """Runs the stages that need no decision by a person. `statuses`: stage statuses for the run's report;
    `waiting`: pending approvals, whose dependent stages do not start yet."""

    def __init__(
        self, planned: Plan, nodes: tuple[Node, ...], schedule: Schedule, statuses: dict[str, Status]
    ):
        self.waiting: list[Verdict] = []
        self._planned = planned
        self._nodes = nodes
        self._schedule = schedule
        self._statuses = statuses
        self._failures: list[Exception] = []  # once there is one, no stage starts
        self._failed_gates: list[Verdict] = []  # gates whose dependent stages do not start
        self._begun: set[str] = set()
        self._passed: set[str] = set()  # stages whose dependents may start

    def pass_ancestors(self) -> None:
        """Checks the gates of the stages' ancestors, which still apply although the ancestors finished in an
        earlier run."""
        for ancestor in self._planned.ancestors(self._nodes):
            if self._goes_on():
                self._pass_gates(ancestor)

    def run_each(self) -> None:
        """Starts each stage as soon as it may start, until there are no more stages to start. Keeps the
        stages' exceptions."""
        stages = (
            Threads(partial(self._work, run_stage.submit))
            if self._schedule.peak > 1
            else OneByOne(partial(self._work, run_stage))
        )
        try:
            with stages:
                while True:
                    self._begin(stages)
                    if not stages.starts:
                        break
                    if self._schedule.peak == 1 and self._goes_on():
                        prepare_next(self._nodes, self._begun)
                    name, result = stages.ended()
                    try:
                        self._end(self._planned[name], result)
                    except Exception as error:
                        self._failures.append(error)
        except BaseException:  # a signal: `_end` re-raises the exceptions of stages
            self._statuses |= {name: interrupted(self._planned[name]) for name in stages.starts}
            raise
        finally:
            prepared.end()

    def act_on_gates(self) -> None:
        """Rolls back a champion whose model failed a gate, and asks for the approvals."""
        roll_back(self._planned, self._failed_gates)
        if self.waiting and not self._failures and self._goes_on():
            ask_about(self._planned, self.waiting)  # even if a failed branch ends the run

    def raise_failures(self) -> None:
        """Raises the exception of a failed stage, GateFailed, or SeveralFailed for more than one failure."""
        failures = list(self._failures)
        if self._failed_gates:
            order = [node.name for node in self._planned.nodes]
            verdicts = sorted(self._failed_gates, key=lambda verdict: order.index(verdict.stage))
            failures.append(GateFailed(verdicts))
        if failures:
            raise failures[0] if len(failures) == 1 else SeveralFailed(failures)

    def _goes_on(self) -> bool:
        stops = any(verdict.gate.on_fail == "stop" for verdict in self._failed_gates)
        return not self._failures and not stops

    def _pass_gates(self, node: Node) -> None:
        verdicts = check_gates(node)
        notify_gates(self._planned.recipe, verdicts)
        self._failed_gates.extend(holding(verdicts))
        open_gates = [verdict for verdict in verdicts if verdict.waits]
        self.waiting.extend(open_gates)
        if not holding(verdicts) and not open_gates and self._passed.issuperset(node.parents):
            self._passed.add(node.name)

    def _begin(self, stages: Threads | OneByOne) -> None:
        """Starts the stages that may start now."""
        if not self._goes_on():
            return
        for start in self._schedule.starts(self._passed, stages.starts, self._begun):
            self._begun.add(start.name)
            stages.begin(self._planned[start.name], start, self._schedule.variables(start))

    def _work(self, call: Callable[..., Any], node: Node) -> Any:
        return call(request_of(self._planned, node), node.run_dir, store_of(self._planned.recipe))

    def _end(self, node: Node, result: Callable[[], Status]) -> None:
        """Records the result of a stage and checks its gates. Raises the error that ended the stage."""
        statuses = self._statuses
        try:
            statuses[node.name] = result()
        except BaseException as error:
            statuses[node.name] = found(node.run_dir)
            if statuses[node.name] != "running":  # "running": another run works on it
                statuses[node.name] = "failed" if isinstance(error, Exception) else interrupted(node)
            raise
        if statuses[node.name] == "done":
            notify_stage(self._planned.recipe, node)
        promote_published(self._planned, node)
        self._pass_gates(node)


def interrupted(node: Node) -> Status:
    """Returns the status of a stage that ended together with its run, for example because of a signal."""
    status = found(node.run_dir)
    return "interrupted" if status == "failed" else status


def request_of(planned: Plan, node: Node) -> StageRequest:
    """Returns the request for a stage's process. A publication's request also has the verdicts of the gates
    that it depends on, for the model card."""
    request = planned.request(node)
    return (
        request.model_copy(update={"gates": gates_behind(planned, node)})
        if KINDS[node.kind].publishes
        else request
    )


def require_parents(planned: Plan, nodes: tuple[Node, ...]) -> None:
    """Raises ValueError when a parent of one of the stages is not done and is not among the stages, or when
    the gates of a publication's ancestors cannot be checked."""
    here = {node.name for node in nodes}
    parents = dict.fromkeys(parent for node in nodes for parent in node.parents if parent not in here)
    missing = [name for name in parents if not planned[name].done]
    if missing:
        raise ValueError(
            f"stage {nodes[0].name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            f" not done: run `alignflow stage {missing[0]} RECIPE` first, or `alignflow run RECIPE` for all"
        )
    gone = uncheckable(planned, nodes)
    if gone:
        raise ValueError(
            f"stage {nodes[-1].name} depends on {gone[0].name}, whose gates cannot be checked because its"
            f" result is gone: run `alignflow stage {gone[0].name} RECIPE` again, or remove its gates from"
            " the recipe"
        )
