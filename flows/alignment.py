"""The flows: a whole recipe, or one of its stages. Read this first.

A stage runs in a process of its own, in a directory named by what decides its result. Whatever is done is recognised and skipped.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime

from rlhf_core.check import require_here
from rlhf_core.config import Recipe
from rlhf_core.plan import Node, Plan, plan
from rlhf_core.recipe import load_recipe
from tasks.report import reported
from tasks.stages import run_stage


def run_name() -> str:
    """A run is called by its recipe."""
    recipe = runtime.flow_run.parameters["recipe"]
    return recipe.name if isinstance(recipe, Recipe) else Path(recipe).stem


@flow(name="alignment", flow_run_name=run_name, persist_result=False)
def alignment(recipe: Recipe | str, overrides: tuple[str, ...] = ()) -> None:
    """Runs all stages of a recipe (a file, or the recipe itself), parents first, and writes its report."""
    planned = plan(recipe_of(recipe, overrides))
    run_all(planned, planned.nodes)


@flow(name="stage", flow_run_name=run_name, persist_result=False)
def stage(recipe: Recipe | str, name: str, overrides: tuple[str, ...] = ()) -> None:
    """Runs one stage of a recipe (or the stages of one loop or round) and no other."""
    planned = plan(recipe_of(recipe, overrides))
    nodes = planned.stages_of(name)
    require_parents(planned, nodes)
    run_all(planned, nodes)


def recipe_of(recipe: Recipe | str, overrides: tuple[str, ...]) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)


def run_all(planned: Plan, nodes: tuple[Node, ...]) -> None:
    """Runs stages in order. Raises ValueError or MachineLacks before any work, StageFailed when a stage fails."""
    require_here(planned, nodes)
    with reported(planned) as statuses:
        for node in nodes:
            statuses[node.name] = "failed"  # until it is done
            statuses[node.name] = run_stage(planned.request(node), node.run_dir)


def require_parents(planned: Plan, nodes: tuple[Node, ...]) -> None:
    """Raises ValueError when a stage's parents are neither done nor about to be run with it."""
    here = {node.name for node in nodes}
    missing = [name for name in dict.fromkeys(p for node in nodes for p in node.parents) if name not in here and not planned[name].done]
    if missing:
        raise ValueError(
            f"stage {nodes[0].name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not done: "
            f"run `alignflow stage {missing[0]} RECIPE` first, or `alignflow run RECIPE` for all"
        )
