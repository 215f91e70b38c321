"""Records the steps of a loop in `loop.json`: that a round begins, is refused or is finished, or that the
loop continues from a champion."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rlhf_core.config import Recipe
from rlhf_core.recipe.inboxes import ends_of
from rlhf_core.recipe.loops.loop_record import Round, RoundInProgress, read, run_dir_of, write_record
from rlhf_core.recipe.loops.loop_state import LoopState, loop_state
from rlhf_core.recipe.loops.planned_round import adopted, is_fresh
from rlhf_core.runs.run_dir import RunDir

ROLLED_BACK = "rolled back"  # start of the reason for leaving out a used round


def begin(recipe: Recipe, state: LoopState) -> LoopState:
    """Records in `loop.json` that the next round is in progress, with the last row that it takes from each
    inbox. Returns the loop's state."""
    loop = state.record.loop
    title = f"{loop}.round{state.number}"
    if is_fresh(state.plan, loop, state.number) and (ends := ends_of(recipe.stages[loop])):
        write_record(
            state.plan.folder,
            state.record.model_copy(
                update={"begun": RoundInProgress(stages={}, at=datetime.now(UTC), taken=ends)}
            ),
        )
        state = loop_state(recipe, loop)
    stages = {node.name: node.digest for node in state.plan.stages_of(title)}
    begun = RoundInProgress(stages=stages, at=datetime.now(UTC), taken=dict(state.plan.taken.get(title, {})))
    write_record(state.plan.folder, state.record.model_copy(update={"begun": begun}))
    return state


def refuse(recipe: Recipe, state: LoopState, why: str) -> LoopState:
    """Records in `loop.json` that the round in progress is refused. The next round starts from the same
    model, with other rows and prompts. Returns the loop's state."""
    assert state.record.begun is not None
    begun = state.record.begun
    now = datetime.now(UTC)
    left = Round(stages=begun.stages, begun=begun.at, ended=now, taken=begun.taken, refused=why)
    record = state.record.model_copy(update={"rounds": (*state.record.rounds, left), "begun": None})
    write_record(state.plan.folder, record)
    return loop_state(recipe, state.record.loop)


def follow(recipe: Recipe, state: LoopState, champion: str, earlier: Mapping[str, str]) -> LoopState:
    """Makes the loop continue from the champion. Records in `loop.json` that the champion's round is used
    again, and that later rounds that were champions are left out, together with the rounds trained from them.
    A round in progress is left out if any of its stages is done; otherwise it starts again.

    `champion` is the stage that created the champion's model. `earlier` holds the stages of previous
    champions, each with the reason for its rollback or ''. Returns the loop's state.
    """
    record = state.record
    rounds = list(record.rounds)
    ours = next((number for number, done in enumerate(rounds) if champion in done.stages), None)
    if ours is None:
        return state
    left_out = rounds[ours].refused.startswith(ROLLED_BACK)  # later rounds were therefore trained without it
    rounds[ours] = rounds[ours].model_copy(update={"refused": ""}) if left_out else rounds[ours]
    for number, done in enumerate(rounds[ours + 1 :], start=ours + 1):
        model = next((name for name in done.stages if name in earlier), None)
        if not done.refused and (model or left_out):
            why = (
                earlier[model] if model else "it was trained from another model"
            ) or f"{champion} was promoted"
            rounds[number] = done.model_copy(update={"refused": f"{ROLLED_BACK}: {why}"})
            left_out = True
    if rounds == list(record.rounds):
        return state
    begun = record.begun
    if begun and any(
        RunDir(run_dir_of(recipe, name, digest)).result() for name, digest in begun.stages.items()
    ):
        why = f"{ROLLED_BACK}: it was trained from another model"
        rounds.append(
            Round(
                stages=begun.stages, begun=begun.at, ended=datetime.now(UTC), taken=begun.taken, refused=why
            )
        )
    write_record(state.plan.folder, record.model_copy(update={"rounds": tuple(rounds), "begun": None}))
    return loop_state(recipe, record.loop)


def finish(state: LoopState) -> Round:
    """Records in `loop.json` that the round recorded by `begin` is finished, and returns it."""
    planned = state.plan
    record = read(state.plan.folder, state.record.loop)
    assert record.begun is not None
    done = adopted(planned, record.loop, state.number).model_copy(
        update={"begun": record.begun.at, "ended": datetime.now(UTC)}
    )
    write_record(planned.folder, record.model_copy(update={"rounds": (*record.rounds, done), "begun": None}))
    return done
