"""Finds lengths that the models of a stage have no positions for. Torch-free. The stage itself checks Hub
ids."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.config import KINDS
from rlhf_core.hub.positions import require_positions, stored_config
from rlhf_core.recipe.plan import Node


def length_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns a sentence for each model that would get more tokens than it has positions, when it trains,
    answers, scores for a calibration, or is served by vLLM.

    `start_of`: the folder or Hub id that a name's chain of models starts from; training does not change
    positions.
    """
    asked = node.config.lengths(getattr(node.config, KINDS[node.kind].start, ""))
    stage = node.name.partition(".")[0]
    problems = []  # named by the recipe's stage, so once for all rounds of a loop
    for (field, name), (tokens, what) in asked.items():
        if not name:
            continue  # a kind of another package without a start model
        place = start_of(name) or ""
        try:
            require_positions(place, stored_config(place), tokens, what)
        except ValueError as error:
            problems.append(f"stages.{stage}{field}: {error}")
    return problems
