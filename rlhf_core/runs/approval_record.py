"""Stores a person's decision on a finished stage in `approval.json` in the stage's run directory. Torch-free.

The file is written when a run first asks, with the deadline, and again with the decision. If a stage runs
again with a new digest, it has a new directory, so the person is asked again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from rlhf_core.records import Frozen
from rlhf_core.system.files import locked, read_json, write_text

FILE = "approval.json"
LOCK = ".approval.lock"


class Approval(Frozen):
    """A question to a person. `recipe`: folder of the recipe's report; `run`: id of the flow run that asked
    and is suspended, if any; `notified`: whether the webhook received the message."""

    stage: str
    recipe: str
    asked: datetime
    until: datetime
    run: str | None = None
    notified: bool = False
    decision: Literal["approved", "refused"] | None = None
    by: str = ""
    reason: str = ""
    at: datetime | None = None

    def state(self, now: datetime | None = None) -> Literal["approved", "refused", "late", "asked"]:
        """Returns the decision; without one, `late` after the deadline, otherwise `asked`."""
        if self.decision is not None:
            return self.decision
        return "late" if (now or datetime.now(UTC)) > self.until else "asked"

    def told(self) -> str:
        """Returns the state as part of a sentence."""
        state = self.state()
        until = f"{self.until:%Y-%m-%d %H:%M} UTC"
        if self.decision is not None:
            return f"{state}{f' by {self.by}' if self.by else ''}{f' ({self.reason})' if self.reason else ''}"
        return f"nobody approved it until {until}" if state == "late" else f"waits for a person until {until}"


def ask(run_dir: Path, stage: str, recipe: Path, within: timedelta, run: str | None = None) -> Approval:
    """Returns the question about a stage, and creates it if there is none yet. `run` is stored in a question
    that has no run yet."""
    with locked(run_dir / LOCK, 60.0):
        found = Approval.read(run_dir / FILE)
        if found is not None and (run is None or found.run is not None or found.decision is not None):
            return found
        now = datetime.now(UTC)
        made = found or Approval(stage=stage, recipe=str(recipe), asked=now, until=now + within)
        made = made.model_copy(update={"run": run})
        write_text(run_dir / FILE, made.model_dump_json(indent=2))
        return made


def mark_notified(run_dir: Path) -> Approval:
    """Records that the message about a question was sent. Returns the question."""
    with locked(run_dir / LOCK, 60.0):
        found = Approval.read(run_dir / FILE)
        assert found is not None
        found = found.model_copy(update={"notified": True})
        write_text(run_dir / FILE, found.model_dump_json(indent=2))
        return found


def decide(run_dir: Path, approved: bool, by: str, reason: str = "", late: bool = False) -> Approval:
    """Stores a decision and returns the question with it. Raises ValueError when no question was asked, when
    a different decision exists, or when the deadline has passed and `late` is false."""
    with locked(run_dir / LOCK, 60.0):
        found = Approval.read(run_dir / FILE)
        if found is None:
            raise ValueError(
                f"{run_dir.name}: nobody asked for an approval: run the recipe until its gate asks"
            )
        decision: Literal["approved", "refused"] = "approved" if approved else "refused"
        if found.decision not in (None, decision):
            raise ValueError(f"{found.stage} is {found.told()} already: make the stage anew to decide again")
        if found.state() == "late" and not late:
            raise ValueError(f"{found.stage}: {found.told()}: give --late to decide all the same")
        if found.decision is None:
            found = found.model_copy(
                update={"decision": decision, "by": by, "reason": reason, "at": datetime.now(UTC)}
            )
            write_text(run_dir / FILE, found.model_dump_json(indent=2))
        return found


def asked_in(recipe: Path) -> list[tuple[Path, Approval]]:
    """Returns the run directories of a recipe that have questions, oldest question first. `recipe`: the
    folder of the recipe's report."""
    stages = recipe.parent / "stages"
    found = [
        (file.parent, read) for file in stages.glob(f"*/{FILE}") if (read := Approval.read(file)) is not None
    ]
    # a stage of its last run may be shared with another recipe, which asked about it
    last = {Path(stage.get("run_dir", "")).name for stage in read_json(recipe / "run.json").get("stages", [])}
    ours = [
        (folder, read)
        for folder, read in found
        if Path(read.recipe).name == recipe.name or folder.name in last
    ]
    return sorted(ours, key=lambda item: item[1].asked)
