"""Records optimiser steps that are skipped because their loss or gradient norm is not finite, up to
`skip_nonfinite_steps` of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_core.runs.run_dir import RunDir
from rlhf_core.system.files import write_text

NONFINITE_STEPS = "nonfinite_steps.jsonl"
TEXT = 200
SHOWN = 40  # characters shown of each row, in the file and in messages
NAMED = 3  # rows of a step that a message shows


class StepRow(NamedTuple):
    """A row of an optimiser step: its index among the stage's training rows, counted from 0, and its text."""

    place: int
    text: str


class SkippedSteps:
    """Counts skipped steps. Resume states keep `count`, so that resuming does not reset the budget."""

    def __init__(self, run: RunDir, allowed: int, count: int, first_step: int, writes: bool):
        """Removes lines for steps after `first_step`, the number of steps done so far, from the file.
        `writes`: whether this rank writes the file."""
        self.allowed = allowed
        self.count = count
        self._file = run / NONFINITE_STEPS
        self._writes = writes
        if writes and self._file.is_file():
            lines = self._file.read_text().splitlines(keepends=True)
            write_text(self._file, "".join(line for line in lines if json.loads(line)["step"] <= first_step))

    def add(self, step: int, error: FloatingPointError, rows: Sequence[StepRow]) -> None:
        """Counts a step and writes its rows to the run directory. Raises FloatingPointError, showing the
        rows, when the budget is spent."""
        what = str(error).partition(",")[0]  # for example: the loss is nan
        if self._writes:
            told = [{"row": row.place, "text": row.text[:TEXT]} for row in rows]
            with self._file.open("a") as file:
                file.write(json.dumps({"step": step, "error": what, "rows": told}) + "\n")
        if self.count >= self.allowed:
            raise FloatingPointError(f"{error}; {self._named(rows)}") from None
        self.count += 1
        if self._writes:
            print(
                f"step {step} is left out ({self.count} of {self.allowed}): {what}; {self._named(rows)}",
                flush=True,
            )

    def _named(self, rows: Sequence[StepRow]) -> str:
        named = ", ".join(f"{row.place} ({row.text[:SHOWN]!r})" for row in rows[:NAMED])
        return f"its {len(rows)} rows are in {self._file.name}: {named}{', ...' if len(rows) > NAMED else ''}"
