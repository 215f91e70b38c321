"""Decides when an inbox has enough feedback for the next round of a loop. Works without Prefect.

It reads `loop.json` and counts rows, so nothing is lost if the process ends: rows that arrived in the
meantime are found at the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhf_core.config import Recipe
from rlhf_core.recipe.inboxes import ends_of, new_rows
from rlhf_core.recipe.loops.loop_choice import loop_of
from rlhf_core.recipe.loops.loop_record import LOCK, folder_of, read
from rlhf_core.system.files import is_locked

LOOK_SECONDS = 5.0  # between two checks of an inbox
SHORTEST_PAUSE = 60.0
LONGEST_PAUSE = 3600.0  # seconds between two starts, if the first finished no round


class InboxWatch:
    """Watches the inboxes of a recipe's loop. Raises ValueError when the recipe does not have exactly one
    loop, or the loop takes no feedback."""

    def __init__(self, recipe: Recipe, clock: Callable[[], float] = time.monotonic):
        self.recipe = recipe
        self.loop = loop_of(recipe)
        self._clock = clock
        config = recipe.stages[self.loop]
        if config.new_rows_needed is None:
            raise ValueError(
                f"recipe {recipe.name}: its loop {self.loop} does not use feedback: use a loop of kind"
                " iterative_feedback"
            )
        self._config = config
        self._wanted = config.new_rows_needed
        self._tried: dict[str, int] | None = None  # the newest rows when a run was last started
        self._rounds = -1
        self._pause = 0.0
        self._earliest = 0.0

    def due(self) -> bool:
        """Returns whether to start a run: either at least `min_new_rows` rows have arrived that no round has
        taken, or a round is unfinished and this object has started no run for it. Rows that were there at the
        last start do not count until a round is finished. Returns False while a run works on the loop, and
        during pauses.

        Raises ValueError when `loop.json` or an inbox cannot be read.
        """
        folder = folder_of(self.recipe)
        if self._clock() < self._earliest or is_locked(folder / LOCK):
            return False
        record = read(folder, self.loop)
        if self._tried is None and record.begun:
            return True
        unanswered = len(record.rounds) == self._rounds  # no round was finished since the last start
        parts = [
            (self._tried or {}) if unanswered else {},
            *(done.taken for done in record.rounds[-1:]),
            record.begun.taken if record.begun else {},
        ]
        seen = {place: max(part.get(place, 0) for part in parts) for part in parts for place in part}
        return new_rows(self._config, seen) >= self._wanted

    def started(self) -> None:
        """Records that a run was started. Each start that finishes no round doubles the pause before the next
        start, from a minute up to an hour."""
        self._tried = ends_of(self._config)
        rounds = len(read(folder_of(self.recipe), self.loop).rounds)
        self._pause = (
            min(max(SHORTEST_PAUSE, 2 * self._pause), LONGEST_PAUSE) if rounds == self._rounds else 0.0
        )
        self._rounds, self._earliest = rounds, self._clock() + self._pause

    def again(self) -> None:
        """Records that the started run crashed, so that its round is due again."""
        self._tried = None


def takes_feedback(recipe: Recipe) -> bool:
    """Returns whether the recipe has a loop that trains on feedback."""
    return any(config.new_rows_needed for config in recipe.stages.values())
