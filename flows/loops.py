"""Defines the flow `loop`, which trains one more round of a loop and ends. It is meant to run on a schedule.

The loop's record on disk (rlhf_core/recipe/loops/loop_record.py) holds the finished rounds and the next one,
including rounds of other runs and of killed runs.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from prefect import get_run_logger, runtime
from prefect.states import Completed

from flows.alignment import flow, require_type, run_all
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import ApprovalAwaited, GateFailed
from rlhf_core.recipe.loops.loop_choice import check_judged, loop_of
from rlhf_core.recipe.loops.loop_record import folder_of, loop_lock
from rlhf_core.recipe.loops.loop_state import LoopState, loop_state
from rlhf_core.recipe.loops.round_steps import begin, finish, follow, refuse
from rlhf_core.runs.remote.remote_files import StoreFault
from rlhf_core.runs.remote.store import store_of
from rlhf_core.stages.publication.champion_record import champions_of, complete
from tasks.decisions.approval import asked_by_this_run
from tasks.keys import provided, variables
from tasks.served import recipe_of_run


@flow
def loop(
    recipe: Recipe | str,
    overrides: tuple[str, ...] = (),
    stage: str | None = None,
    max_rounds: int | None = None,
    min_gain: float | None = None,
) -> Any:
    """Trains, evaluates and publishes the next round of a recipe's loop. A run that has nothing to do
    completes with the reason as its message.

    First fetches rounds that only the recipe's store has. `stage`: the loop, if the recipe has several. The
    loop ends after `max_rounds` rounds, or when its last round's win rate exceeds the previous round's by no
    more than `min_gain` (which needs an evaluation of the loop).
    """
    loaded = recipe_of_run(recipe, overrides, runtime.flow_run.id, runtime.deployment.id)
    require_type("stage", stage, str, None)
    require_type("max_rounds", max_rounds, int, None)
    require_type("min_gain", min_gain, float, int, None)
    name = loop_of(loaded, stage)
    due = datetime.fromisoformat(str(runtime.flow_run.scheduled_start_time or datetime.now(UTC)))
    with provided(variables(loaded)), loop_lock(folder_of(loaded)) as mine:
        if not mine:
            return _completed(
                f"another run is already training {name} of {loaded.name}: this run does nothing"
            )
        if min_gain is not None:
            check_judged(loaded, name)
        fetched = False
        store = store_of(loaded)
        while True:
            found = _from_champion(loaded, loop_state(loaded, name))
            asked = any(asked_by_this_run(found.plan[verdict.stage].run_dir) for verdict in found.held)
            if (found.renewed or found.turned_down) and not asked:
                gate = found.held[0]
                get_run_logger().warning(
                    "%s: round %d was refused and is skipped: %s", name, found.number, gate.summary
                )
                found = refuse(loaded, found, gate.summary)
            why = found.why_not(max_rounds, min_gain, None if fetched else due)
            if why:
                return _completed(f"{name} of {loaded.name}: {why}")
            missing = [node for node in found.plan.stages_of(f"{name}.round{found.number}") if not node.done]
            fetched = (
                store is not None and bool(missing) and all(store.has(node.run_dir.name) for node in missing)
            )
            get_run_logger().info(
                "%s: round %d %s", name, found.number, "was found in the store" if fetched else "begins"
            )
            found = begin(loaded, found)
            try:
                run_all(found.plan, found.plan.nodes)
            except ApprovalAwaited as error:
                return _completed(f"{name} of {loaded.name}: round {found.number}: {error}")
            except GateFailed as error:
                state = loop_state(loaded, name)
                held = {verdict.stage for verdict in state.held if verdict.gate.approve}
                if not all(verdict.gate.approve and verdict.stage in held for verdict in error.verdicts):
                    raise
                why = error.verdicts[0].summary
                refuse(loaded, state, why)
                return _completed(f"{name} of {loaded.name}: round {found.number} is skipped: {why}")
            done = finish(found)
            if not fetched:  # rounds in the store come first, for example on an empty disk
                rate = "" if done.win_rate is None else f", win rate {done.win_rate:.3f}"
                return _completed(f"{name} of {loaded.name}: round {found.number} is done{rate}")


def _from_champion(recipe: Recipe, found: LoopState) -> LoopState:
    """Returns the state of a loop that continues from the recipe's champion, even if a person has rolled back
    or promoted a model. Also completes an interrupted move of the champion."""
    folder = found.plan.folder
    try:
        with suppress(ValueError):  # the Hub refused this move for good; the next one replaces it
            complete(folder, store_of(recipe))
    except (ConnectionError, StoreFault) as error:
        get_run_logger().warning("the champion's move is not completed yet: %s", error)
    *earlier, now = champions_of(folder).reigns or (None,)
    if now is None:
        return found
    followed = follow(
        recipe,
        found,
        now.model,
        {reign.model: reign.ended for reign in earlier if reign and reign.model != now.model},
    )
    if followed is not found:
        get_run_logger().warning("%s continues from %s, the champion", found.record.loop, now.model)
    return followed


def _completed(sentence: str) -> Any:
    get_run_logger().info(sentence)
    return Completed(message=sentence)
