"""A loop on feedback after a rollback: which round it goes on from, and what becomes of the rounds in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config import Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.recipe.loops.loop_state import loop_state
from rlhf_core.recipe.loops.round_steps import begin, follow
from tests.unit.recipe.test_feedback_rounds import do, inbox, one_round, recipe, rows, say

__all__ = ["inbox"]


MODELS = [f"loop.round{number}.dpo" for number in range(5)]


def three_rounds(folder: Path, inbox: Inbox) -> Recipe:
    of = recipe(folder)
    for name in ("a", "b", "c"):
        say(inbox, name)
        one_round(of)
    return of


def test_the_loop_goes_on_from_the_champion_after_a_rollback(tmp_path: Path, inbox: Inbox) -> None:
    of = three_rounds(tmp_path, inbox)
    before = loop_state(of, "loop")
    assert follow(of, before, MODELS[3], {MODELS[1]: "", MODELS[2]: ""}) is before, "nobody rolled back"
    found = follow(of, before, MODELS[1], {MODELS[2]: "", MODELS[3]: "rude answers"})
    assert [done.refused for done in found.record.rounds] == [
        "",
        "rolled back: loop.round1.dpo was promoted",
        "rolled back: rude answers",
    ]
    say(inbox, "d")
    planned = one_round(of).plan
    assert rows(planned["loop.round4"]) == ["d"] and planned["loop.round4"].parents == (MODELS[1],)
    again = follow(of, loop_state(of, "loop"), MODELS[3], {MODELS[1]: "", MODELS[2]: ""})
    # round 4 was trained from round 1
    assert [bool(done.refused) for done in again.record.rounds] == [False, True, False, True]


@pytest.mark.parametrize("trained", ["with all", "alone", ""])
def test_a_round_in_progress_does_not_outlive_the_model_that_it_was_trained_from(
    tmp_path: Path, inbox: Inbox, trained: str
) -> None:
    of = three_rounds(tmp_path, inbox)
    say(inbox, "d")
    begun = begin(of, loop_state(of, "loop"))
    if trained:
        # the last one is the evaluation
        do(replace(begun.plan, nodes=begun.plan.nodes[: None if trained == "with all" else -1]))
    found = follow(of, loop_state(of, "loop"), MODELS[2], {MODELS[1]: "", MODELS[3]: "rude answers"})
    assert found.number == (5 if trained else 4) and found.record.begun is None
    assert (
        found.record.rounds[-1].refused
        == f"rolled back: {'it was trained from another model' if trained else 'rude answers'}"
    )
    say(inbox, "e")
    planned = one_round(of).plan
    node = planned[f"loop.round{found.number}"]
    assert rows(node) == (["e"] if trained else ["d", "e"]) and node.parents == (MODELS[2],)


def test_the_champion_of_another_loop_changes_nothing(tmp_path: Path, inbox: Inbox) -> None:
    before = loop_state(three_rounds(tmp_path, inbox), "loop")
    assert follow(recipe(tmp_path), before, "sft", {MODELS[3]: "rude answers"}) is before
