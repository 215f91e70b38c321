"""Finds the next round of a loop from `loop.json` and the run directories on disk. Torch-free, without
Prefect.

Finished rounds keep the digests of their stages in every later plan, so edits to a recipe apply to later
rounds and no round is repeated. Rounds trained by another command (`alignflow run` with more `rounds`) are
found through their run directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from rlhf_core.config import Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.hub.revisions import Pins
from rlhf_core.recipe.inboxes import pinned_ends, rows_awaited
from rlhf_core.recipe.loops.loop_choice import with_rounds
from rlhf_core.recipe.loops.loop_record import FILE, Record, folder_of, read, run_dir_of
from rlhf_core.recipe.loops.planned_round import (
    adopted,
    failed_gates,
    is_fresh,
    is_settled,
    stages_of_round,
    waiting_gates,
)
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.run_dir import RunDir


@dataclass(frozen=True)
class LoopState:
    """Holds the state of a loop: its record, the number of the next round, and the plan up to that round.
    `failed` holds the gates that stop the loop. `waits` is a sentence that names the condition for which the
    next round waits, or ''."""

    record: Record
    number: int
    plan: Plan
    failed: tuple[Verdict, ...]
    waits: str = ""

    @property
    def held(self) -> tuple[Verdict, ...]:
        """Returns the failed gates of the round in progress, on its stages and on their dependents."""
        ours = {node.name for node in self.plan.stages_of(f"{self.record.loop}.round{self.number}")}
        for node in self.plan.nodes:  # parents first
            if ours.intersection(node.parents):
                ours.add(node.name)
        return tuple(verdict for verdict in self.failed if verdict.stage in ours)

    @property
    def turned_down(self) -> bool:
        """Returns whether a person refused the round in progress or did not approve it in time."""
        return self.record.begun is not None and any(verdict.gate.approve for verdict in self.held)

    @property
    def waiting(self) -> tuple[Verdict, ...]:
        """Returns the gates that wait for a person's approval."""
        return waiting_gates(self.plan)

    @property
    def renewed(self) -> bool:
        """Returns whether a gate failed in the round in progress and the inboxes have rows for another
        round."""
        taken = self.record.begun.taken if self.record.begun else {}
        title = f"{self.record.loop}.round{self.number}"
        return bool(self.held and taken) and not rows_awaited(
            self.plan.recipe, self.record.loop, self.number + 1, {title: taken}
        )

    def done(self) -> tuple[str, ...]:
        """Returns the names of the next round's finished stages."""
        return tuple(
            node.name for node in self.plan.stages_of(f"{self.record.loop}.round{self.number}") if node.done
        )

    def why_not(
        self, max_rounds: int | None = None, min_gain: float | None = None, due: datetime | None = None
    ) -> str:
        """Returns a sentence that explains why the next round should not begin, or '' if it should.

        It should not begin after `max_rounds` rounds, or if the last round raised the win rate by no more
        than `min_gain`. It should also not begin if the last round began after `due`, the scheduled time of
        this run, since that round already replaced the round that this run would train.
        """
        rounds = self.record.rounds
        used = self.record.used
        if max_rounds is not None and len(rounds) >= max_rounds:
            refused = f" ({len(rounds) - len(used)} of them refused)" if len(used) < len(rounds) else ""
            return (
                f"{len(rounds)} rounds are done{refused}, and --max-rounds (parameter max_rounds of the flow)"
                f" is {max_rounds}"
            )
        if min_gain is not None and len(used) > 1:
            last = used[-1].win_rate
            before = used[-2].win_rate if used[-1].before is None else used[-1].before
            if before is not None and last is not None and last - before <= min_gain:
                change = f"from {before:.3f} to {last:.3f} in round {rounds.index(used[-1]) + 1}"
                return f"the win rate went {change}: it does not rise by more than {min_gain:g}"
        if due is not None and rounds and rounds[-1].begun is not None and rounds[-1].begun > due:
            return (
                f"round {len(rounds)} was begun and finished after {due:%Y-%m-%d %H:%M:%S} UTC, when this run"
                " was due"
            )
        return self.waits


def loop_state(recipe: Recipe, loop: str) -> LoopState:
    """Reads the state of a loop from its record and the run directories.

    Raises ValueError if a finished round's run directory is missing or incomplete, and for the same reasons
    as `read` and `plan`.
    """
    folder = folder_of(recipe)
    record = read(folder, loop)
    kept = {name: digest for done in record.used for name, digest in done.stages.items()}
    _check_there(recipe, loop, kept)
    begun = record.begun.stages if record.begun else {}
    number = len(record.rounds) + 1
    taken = {f"{loop}.round{i}": done.taken for i, done in enumerate(record.rounds, start=1) if done.taken}
    taken |= {f"{loop}.round{number}": record.begun.taken} if record.begun and record.begun.taken else {}
    if begun and all(RunDir(run_dir_of(recipe, name, digest)).result() for name, digest in begun.items()):
        held = failed_gates(plan(with_rounds(recipe, loop, number), kept | begun, taken, record.refused))
        # Keep the digests of a round that is trained but not yet evaluated or published. A round that failed
        # a gate may be trained again.
        kept |= {} if held else begun
    taken |= _rows_of_done(recipe, record, number, kept, taken)
    planned = plan(with_rounds(recipe, loop, number), kept, taken, record.refused)
    while planned[f"{loop}.round{number}"].done:
        taken |= _rows_of_done(recipe, record, number + 1, kept, taken)
        following = plan(with_rounds(recipe, loop, number + 1), kept, taken, record.refused)
        moved_on = following[f"{loop}.round{number + 1}"].done
        if not moved_on and not is_settled(planned):
            break
        kept |= stages_of_round(planned, loop, number)
        record = record.model_copy(
            update={"rounds": (*record.rounds, adopted(planned, loop, number)), "begun": None}
        )
        number = number + 1
        planned = following
    waits = rows_awaited(recipe, loop, number, taken) if is_fresh(planned, loop, number) else ""
    return LoopState(record, number, planned, failed_gates(planned), waits)


def _rows_of_done(
    recipe: Recipe,
    record: Record,
    number: int,
    kept: Mapping[str, str],
    taken: Mapping[str, Mapping[str, int]],
) -> dict[str, dict[str, int]]:
    """Returns the inbox rows of a round that another command has trained: the rows with which it was planned,
    if its result exists."""
    title = f"{record.loop}.round{number}"
    pinned = pinned_ends(recipe, record.loop, title, Pins(folder_of(recipe))) if title not in taken else {}
    if not pinned:
        return {}
    as_planned = plan(
        with_rounds(recipe, record.loop, number), kept, {**taken, title: pinned}, record.refused
    )
    return {title: pinned} if as_planned[title].done else {}


def _check_there(recipe: Recipe, loop: str, kept: Mapping[str, str]) -> None:
    gone = [
        run_dir_of(recipe, name, digest) for name, digest in kept.items() if name.startswith(f"{loop}.round")
    ]
    gone = [folder for folder in gone if RunDir(folder).result() is None]
    if gone:
        raise ValueError(
            f"{gone[0]} of a finished round is missing or incomplete: restore it, or remove"
            f" {folder_of(recipe) / FILE} to train again what is missing"
        )
