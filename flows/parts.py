"""Defines the flows `evaluate` and `publish`, which run parts of a recipe. The parent stages must be done;
these flows train nothing."""

from __future__ import annotations

from prefect import runtime

from flows.alignment import flow, require_parents, require_type, run_all
from rlhf_core.config import Recipe
from rlhf_core.config.kinds import named
from rlhf_core.recipe.plan import plan
from rlhf_core.recipe.sentences import unknown
from tasks.keys import provided, variables
from tasks.served import recipe_of_run
from tasks.stored_stages import fetch_parents


@flow
def evaluate(recipe: Recipe | str, overrides: tuple[str, ...] = (), name: str | None = None) -> None:
    """Runs the evaluations and alignment taxes of a recipe, or one of them."""
    _part(recipe, overrides, named("report"), name)


@flow
def publish(recipe: Recipe | str, overrides: tuple[str, ...] = (), name: str | None = None) -> None:
    """Runs the publications of a recipe, or one of them."""
    _part(recipe, overrides, named("published"), name)


def _part(recipe: Recipe | str, overrides: tuple[str, ...], kinds: tuple[str, ...], name: str | None) -> None:
    loaded = recipe_of_run(recipe, overrides, runtime.flow_run.id, runtime.deployment.id)
    require_type("name", name, str, None)
    with provided(variables(loaded)):
        planned = plan(loaded)
        nodes = tuple(node for node in planned.nodes if node.kind in kinds)
        if name is not None:
            here = tuple(node for node in nodes if node.name == name or node.name.startswith(f"{name}."))
            if not here:
                raise ValueError(
                    f"recipe {loaded.name}:"
                    f" {unknown(name, [node.name for node in nodes], ' or '.join(kinds))}"
                )
            nodes = here
        if not nodes:
            raise ValueError(f"recipe {loaded.name} has no stage of kind {' or '.join(kinds)}: add one")
        fetch_parents(planned, nodes)
        require_parents(planned, nodes)
        run_all(planned, nodes)
