"""Finds the loop of a recipe by name, and changes its number of rounds."""

from __future__ import annotations

from rlhf_core.config import KINDS, Evaluation, Recipe
from rlhf_core.recipe.sentences import unknown

LOOPS = " or ".join(name for name, kind in KINDS.items() if kind.is_loop)


def loop_of(recipe: Recipe, name: str | None = None) -> str:
    """Returns the name of a recipe's loop stage. Raises ValueError if there is no loop, if `name` is not a
    loop, or if there are several loops and no name is given."""
    loops = [stage for stage, config in recipe.stages.items() if KINDS[config.stage].is_loop]
    if name is not None and name not in loops:
        raise ValueError(
            f"recipe {recipe.name}: {unknown(name, loops, 'loop')}; name a stage of kind {LOOPS}"
        )
    if name is None and len(loops) != 1:
        what = (
            f"{len(loops)} loops ({', '.join(loops)}): say which one with `stage`"
            if loops
            else f"no stage of kind {LOOPS}"
        )
        raise ValueError(f"recipe {recipe.name} has {what}")
    return name or loops[0]


def check_judged(recipe: Recipe, loop: str) -> None:
    """Raises ValueError if no evaluation judges the loop's rounds, which `min_gain` requires."""
    judged = [
        model for config in recipe.stages.values() if type(config) is Evaluation for model in config.models
    ]
    if not any(model == loop or model.startswith(f"{loop}.round") for model in judged):
        raise ValueError(
            f"recipe {recipe.name}: --min-gain (parameter min_gain of the flow) needs an evaluation that"
            f" judges {loop}: add one, or leave it out"
        )


def with_rounds(recipe: Recipe, loop: str, rounds: int) -> Recipe:
    """Returns the recipe with a different number of rounds. Rounds in both recipes keep their digests."""
    return recipe.model_copy(
        update={"stages": recipe.stages | {loop: recipe.stages[loop].model_copy(update={"rounds": rounds})}}
    )
