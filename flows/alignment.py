"""The flows `alignment`, a whole recipe, and `stage`, one of its stages. Read this first. (loops.py: loops; parts.py: evaluate, publish.)

A stage runs in a process of its own, in a directory named by what decides its result. Whatever is done is recognised and skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import flow, runtime

from rlhf_core import watch
from rlhf_core.check import require_here
from rlhf_core.config import Publication, Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.gates import GateFailed, gates_behind, holding, uncheckable
from rlhf_core.plan import Node, Plan, plan
from rlhf_core.recipe import given_recipe
from rlhf_core.revisions import forget
from rlhf_core.stage import StageRequest
from rlhf_core.store import store_of
from tasks.gates import check_gates
from tasks.keys import provided, variables
from tasks.notify import tell_gates, tell_stage, tell_state
from tasks.report import reported, statuses_of
from tasks.stages import run_stage
from tasks.store import bring_parents
from tasks.temporary_server import watch_server

# Of every flow. Its recipe's webhook is told about the states of a run; parameters are checked by `given_recipe`, in a sentence of ours.
SETTINGS: dict[str, Any] = {hook: [tell_state] for hook in ("on_running", "on_completion", "on_failure", "on_crashed", "on_cancellation")}
SETTINGS |= {"persist_result": False, "validate_parameters": False}


def run_name() -> str:
    """A run is called by its recipe."""
    recipe = runtime.flow_run.parameters.get("recipe")
    if isinstance(recipe, dict):
        return str(recipe.get("name"))
    return recipe.name if isinstance(recipe, Recipe) else Path(str(recipe)).stem


@flow(name="alignment", flow_run_name=run_name, **SETTINGS)
def alignment(recipe: Recipe | str, overrides: tuple[str, ...] = (), latest: bool = False) -> None:
    """Runs all stages of a recipe (a path, a URI, or the recipe itself), parents first, and writes its report. `latest`: `look_up_anew`."""
    loaded = given_recipe(recipe, overrides)
    require_type("latest", latest, bool)
    if latest:
        look_up_anew(loaded)
    with provided(variables(loaded)):
        planned = plan(loaded)
        run_all(planned, planned.nodes)


@flow(name="stage", flow_run_name=run_name, **SETTINGS)
def stage(recipe: Recipe | str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """Runs one stage of a recipe (or the stages of one loop or round) and no other."""
    loaded = given_recipe(recipe, overrides)
    require_type("name", name, str)
    with provided(variables(loaded)):
        planned = plan(loaded)
        nodes = planned.stages_of(name)
        bring_parents(planned, nodes)
        require_parents(planned, nodes)
        run_all(planned, nodes)


def require_type(name: str, value: object, *kinds: type | None) -> None:
    """Raises ValueError when a flow's parameter is of none of these types (None: it may be left out)."""
    if not (value is None and None in kinds) and type(value) not in kinds:
        wanted = " or ".join("nothing" if kind is None else kind.__name__ for kind in kinds)
        raise ValueError(f"parameter {name}: give {wanted}, not {str(value)[:60]!r}")


def look_up_anew(recipe: Recipe) -> None:
    """Forgets which commits the recipe's branches and tags of the Hub stand for, once its last run is finished: a loop goes on from what
    it published last, and a run that was cut off goes on with the commits that it began with."""
    folder = Path(recipe.artifacts).absolute() / recipe.name
    if all(status in ("done", "skipped") for status in statuses_of(folder).values()):
        forget(folder)


def run_all(planned: Plan, nodes: tuple[Node, ...]) -> None:
    """Runs stages in order, each when the gates of its parents are passed.

    Raises ValueError or MachineLacks before any work, StageFailed when a stage fails, GateFailed when a gate held stages back.
    """
    require_here(planned, nodes)
    if "PREFECT__FLOW_RUN_ID" in os.environ:  # a worker started this process: a run of its own does not outlive it
        watch.end_with_parent()
    watch_server()
    failed: list[Verdict] = []  # gates that keep other stages from starting
    held: set[str] = set()  # stages that do not let others start

    def pass_gates(node: Node) -> None:
        verdicts = check_gates(node)
        tell_gates(planned.recipe, verdicts)
        found = holding(verdicts)
        failed.extend(found)
        if any(verdict.gate.on_fail == "stop" for verdict in found):
            raise GateFailed(failed)
        if found:
            held.add(node.name)

    with reported(planned) as statuses:
        for ancestor in planned.ancestors(nodes):  # done in an earlier run, with gates that count now as well
            if held.intersection(ancestor.parents):
                held.add(ancestor.name)
            pass_gates(ancestor)
        for node in nodes:
            if held.intersection(node.parents):
                held.add(node.name)
                continue
            statuses[node.name] = "failed"  # until it is done
            statuses[node.name] = run_stage(request_of(planned, node), node.run_dir, store_of(planned.recipe))
            if statuses[node.name] == "done":
                tell_stage(planned.recipe, node)
            pass_gates(node)
        if failed:
            raise GateFailed(failed)


def request_of(planned: Plan, node: Node) -> StageRequest:
    """What a stage's process is asked; a publication also hears which gates its stages passed, for its card."""
    request = planned.request(node)
    return request.model_copy(update={"gates": gates_behind(planned, node)}) if isinstance(node.config, Publication) else request


def require_parents(planned: Plan, nodes: tuple[Node, ...]) -> None:
    """Raises ValueError when a stage's parents are neither done nor about to be run with it, or the gates behind a publication cannot be
    checked."""
    here = {node.name for node in nodes}
    parents = dict.fromkeys(parent for node in nodes for parent in node.parents if parent not in here)
    missing = [name for name in parents if not planned[name].done]
    if missing:
        raise ValueError(
            f"stage {nodes[0].name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not done: "
            f"run `alignflow stage {missing[0]} RECIPE` first, or `alignflow run RECIPE` for all"
        )
    if gone := uncheckable(planned, nodes):
        raise ValueError(
            f"stage {nodes[-1].name} depends on {gone[0].name}, whose gates cannot be checked because its result is gone: "
            f"run `alignflow stage {gone[0].name} RECIPE` again, or take its gates out of the recipe"
        )
