"""What all commands share: where they print, and their exit codes."""

from __future__ import annotations

import sys

from rich.console import Console

from rlhf_core.plan import Plan
from rlhf_core.revisions import PINS

OK, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143  # WRONG_INPUT and ENVIRONMENT, 2 and 3, are also those of a stage's process

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def tell_pins(planned: Plan) -> None:
    """The branches and tags of the Hub that a recipe names, with their commits."""
    for pin in planned.pins:
        console.print(f"{pin.reference} is commit {pin.commit}, kept in {planned.folder / PINS}", markup=False, highlight=False)
