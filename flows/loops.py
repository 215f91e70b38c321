"""Loops as flows: `loop` trains the next round and ends, for a schedule; `iterative_preference` trains round after round.

What is finished and what comes next is on disk (rlhf_core/loops.py): it does not matter who trained the rounds before, or how they ended.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.states import Completed

from flows.alignment import SETTINGS, require_type, run_all, run_name
from rlhf_core.config import Recipe
from rlhf_core.loops import alone, begin, check_judged, finish, folder_of, loop_of, standing
from rlhf_core.recipe import given_recipe
from rlhf_core.store import store_of
from tasks.keys import provided, variables


@flow(name="loop", flow_run_name=run_name, **SETTINGS)
def loop(
    recipe: Recipe | str,
    overrides: tuple[str, ...] = (),
    stage: str | None = None,
    max_rounds: int | None = None,
    min_gain: float | None = None,
) -> Any:
    """Trains the next round of a recipe's loop, evaluates and publishes it. A run that finds nothing to do says why, and completes.
    Rounds that are in the recipe's store alone are fetched before that.

    `stage`: which loop, where a recipe has several. `max_rounds`, `min_gain`: when to stop, as for `iterative_preference`.
    """
    due = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    return _rounds(given_recipe(recipe, overrides), stage, max_rounds, min_gain, datetime.fromisoformat(str(due)), once=True)


@flow(name="iterative_preference", flow_run_name=run_name, **SETTINGS)
def iterative_preference(
    recipe: Recipe | str, overrides: tuple[str, ...] = (), rounds: int = 3, min_gain: float | None = None, stage: str | None = None
) -> Any:
    """Trains until `rounds` rounds are done, or until the win rate of the last round is not more than `min_gain` above the round before it.

    With `min_gain` the recipe needs an evaluation of the loop. Rounds that are done already count.
    """
    return _rounds(given_recipe(recipe, overrides), stage, rounds, min_gain, None, once=False)


def _rounds(recipe: Recipe, stage: str | None, max_rounds: int | None, min_gain: float | None, due: datetime | None, once: bool) -> Any:
    require_type("stage", stage, str, None)
    require_type("the number of rounds", max_rounds, int, None)
    require_type("min_gain", min_gain, float, int, None)
    name = loop_of(recipe, stage)
    with provided(variables(recipe)), alone(folder_of(recipe)) as mine:
        if not mine:
            return _told(f"another run is training {name} of {recipe.name}: this one leaves it to that")
        if min_gain is not None:
            check_judged(recipe, name)
        fetched, store = False, store_of(recipe)
        while True:
            found = standing(recipe, name)
            if why := found.why_not(max_rounds, min_gain, None if fetched else due):
                return _told(f"{name} of {recipe.name}: {why}")
            missing = [node for node in found.plan.stages_of(f"{name}.round{found.number}") if not node.done]
            fetched = store is not None and bool(missing) and all(store.has(node.run_dir.name) for node in missing)
            get_run_logger().info("%s: round %d %s", name, found.number, "is in the store" if fetched else "begins")
            begin(found)
            run_all(found.plan, found.plan.nodes)
            done = finish(found)
            if once and not fetched:  # on an empty disk rounds of the store come first
                rate = "" if done.win_rate is None else f", win rate {done.win_rate:.3f}"
                return _told(f"{name} of {recipe.name}: round {found.number} is done{rate}")


def _told(sentence: str) -> Any:
    get_run_logger().info(sentence)
    return Completed(message=sentence)
