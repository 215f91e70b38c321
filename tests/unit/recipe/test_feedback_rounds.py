"""Which rows of an inbox a stage and each round of a loop read: none twice, none that came after a round
began, none of a refused round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.cli.loop_commands import next_of
from rlhf_core.config import Gate, Publication, Recipe
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.parse import feedback_of
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.loops.loop_choice import with_rounds
from rlhf_core.recipe.loops.loop_record import directories, folder_of
from rlhf_core.recipe.loops.loop_state import LoopState, loop_state
from rlhf_core.recipe.loops.round_steps import begin, finish, refuse
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.run_dir import Outcome, RunDir

QUESTIONS = ["What is the capital city of France?"]


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS)
    )
    return Inbox(tmp_path / "night.inbox")


def recipe(folder: Path, gate: float | None = None, **loop: Any) -> Recipe:
    gates = {"gates": [{"metric": "accuracy", "min": gate}]} if gate is not None else {}
    source = {"feedback": {"sources": str(folder / "night.inbox")}}
    stages = {
        "sft": {"data": {"sources": "train.jsonl"}},
        "loop": {"stage": "iterative_feedback", "method": "dpo", "rounds": 1, **source, **gates, **loop},
        "evaluation": {"models": ["loop"], "questions": {"path": str(folder / "q.jsonl")}},
    }
    return Recipe(name="night", base_model="org/base", artifacts=str(folder / "artifacts"), stages=stages)


def changed(of: Recipe, stage: str, **fields: Any) -> Recipe:
    stages = of.stages | {stage: of.stages[stage].model_copy(update=fields)}
    return of.model_copy(update={"stages": stages})


def say(inbox: Inbox, *names: str) -> None:
    inbox.add([feedback_of({"prompt": name, "chosen": "good", "rejected": "bad"}) for name in names])


def rows(node: Node) -> list[str]:
    """The prompts that a planned stage trains on."""
    path = Path(node.config.data.sources[0].path)  # type: ignore[attr-defined]
    return [json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()]


def do(planned: Plan, accuracy: float = 1.0) -> None:
    """What the stages of a plan leave behind."""
    for node in planned.nodes:
        run = RunDir(node.run_dir)
        if run.result() is None:
            run.prepare(planned.request(node))
            (run / "checkpoint").write_text(node.digest)
            run.finish(
                planned.request(node),
                Outcome({"accuracy": accuracy, "loss": 1 - accuracy}, {"checkpoint": "checkpoint"}),
                1.0,
            )


def one_round(of: Recipe, accuracy: float = 1.0) -> LoopState:
    found = begin(of, loop_state(of, "loop"))
    do(found.plan, accuracy)
    if not loop_state(of, "loop").failed:
        finish(found)
    return found


def test_each_round_takes_the_rows_that_are_new(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a", "b")
    assert rows(one_round(recipe(tmp_path)).plan["loop.round1"]) == ["a", "b"]
    say(inbox, "c")
    assert rows(one_round(recipe(tmp_path)).plan["loop.round2"]) == ["c"]
    told = loop_state(recipe(tmp_path), "loop").why_not()
    assert "round 3 waits for feedback: night.inbox has 0 new rows that it can use" in told


def test_a_plan_of_the_recipe_begins_no_round(tmp_path: Path, inbox: Inbox) -> None:
    """`alignflow serve` and `validate` plan the recipe too."""
    say(inbox, "a", "b")
    plan(recipe(tmp_path, min_new_rows=3))
    assert "has 2 new rows that it can use" in loop_state(recipe(tmp_path, min_new_rows=3), "loop").why_not()
    say(inbox, "c")
    assert rows(one_round(recipe(tmp_path, min_new_rows=3)).plan["loop.round1"]) == ["a", "b", "c"]


def test_a_round_that_has_begun_keeps_its_rows(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    begun = begin(recipe(tmp_path), loop_state(recipe(tmp_path), "loop"))
    RunDir(begun.plan["loop.round1"].run_dir).prepare(begun.plan.request(begun.plan["loop.round1"]))
    say(inbox, "b")
    again = begin(recipe(tmp_path), loop_state(recipe(tmp_path), "loop"))
    assert again.plan["loop.round1"].digest == begun.plan["loop.round1"].digest
    assert rows(again.plan["loop.round1"]) == ["a"]
    do(again.plan)
    finish(again)
    assert rows(one_round(recipe(tmp_path)).plan["loop.round2"]) == ["b"]


def test_a_look_at_the_loop_takes_no_rows(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    for _ in range(2):
        loop_state(recipe(tmp_path), "loop")
    assert not (inbox.folder / "taken").exists()
    say(inbox, "b")
    assert rows(one_round(recipe(tmp_path)).plan["loop.round1"]) == ["a", "b"]


def test_a_round_waits_for_enough_rows_of_its_method(tmp_path: Path, inbox: Inbox) -> None:
    wants = recipe(tmp_path, min_new_rows=2)
    assert "has 0 new rows that it can use, and it begins with 2" in loop_state(wants, "loop").why_not()
    say(inbox, "a")
    inbox.add([feedback_of({"prompt": f"q{i}", "response": "x", "thumb": "up"}) for i in range(5)])
    assert "has 1 new rows" in loop_state(wants, "loop").why_not()
    assert loop_state(recipe(tmp_path, method="kto", min_new_rows=5), "loop").why_not() == ""
    say(inbox, "b")
    assert loop_state(wants, "loop").why_not() == ""


def test_a_refused_round_is_left_out_with_its_rows(tmp_path: Path, inbox: Inbox) -> None:
    gated = recipe(tmp_path, gate=0.5)
    say(inbox, "a")
    one_round(gated)
    say(inbox, "poison")
    one_round(gated, accuracy=0.1)
    # there is nothing new to train on
    assert loop_state(gated, "loop").failed and not loop_state(gated, "loop").renewed
    say(inbox, "c")
    found = loop_state(gated, "loop")
    assert found.number == 2 and found.renewed
    found = refuse(gated, found, found.failed[0].summary)
    assert found.number == 3
    assert not found.failed
    assert "loop.round2.dpo" not in [node.name for node in found.plan.nodes]
    done = one_round(gated)
    assert rows(done.plan["loop.round3"]) == ["c"]
    assert done.plan["loop.round3"].stages == {"loop.round1.dpo": "loop.round1.dpo"}
    assert done.plan["evaluation"].config.models == ("loop.round1", "loop.round3")  # type: ignore[attr-defined]
    assert [bool(one.refused) for one in loop_state(gated, "loop").record.rounds] == [False, True, False]
    assert not any("round2" in name for name in directories(folder_of(gated)))


def test_one_run_takes_what_is_there_until_it_is_told_to_move_on(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    first = plan(recipe(tmp_path))
    say(inbox, "b")
    second = plan(recipe(tmp_path))
    assert rows(first["loop"]) == rows(second["loop"]) == ["a"]
    assert first["loop"].digest == second["loop"].digest
    (folder_of(recipe(tmp_path)) / "pins.json").unlink()
    assert rows(plan(recipe(tmp_path))["loop"]) == ["a", "b"]


def test_a_round_of_one_run_is_adopted_by_the_nightly_loop(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    do(plan(recipe(tmp_path)))
    say(inbox, "b")
    found = one_round(recipe(tmp_path))
    assert found.number == 2 and rows(found.plan["loop.round2"]) == ["b"]


def test_rows_that_meet_questions_of_the_recipe_are_left_out(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a", "what is the CAPITAL city of France")
    assert rows(plan(recipe(tmp_path))["loop"]) == ["a"]


def test_what_is_missing_is_told(tmp_path: Path, inbox: Inbox) -> None:
    def told(planned: Plan) -> str:
        return "\n".join(check_inputs(planned, [planned["loop"]]))

    assert "there is no such inbox: `alignflow feedback import FILE --inbox" in told(plan(recipe(tmp_path)))
    inbox.add([feedback_of({"prompt": "q", "response": "x", "thumb": "up"})])
    assert "night.inbox: has no (new) rows of the kind that this stage trains" in told(plan(recipe(tmp_path)))
    with pytest.raises(ValueError, match="is an inbox, which has no rows for it"):
        plan(
            Recipe(
                name="n",
                base_model="org/base",
                stages=dict(
                    evaluation=dict(models=["org/a"], baseline="org/b", questions={"path": str(inbox.folder)})
                ),
            )
        )


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        ({"feedback": {"sources": "rows.jsonl"}}, "no source is an inbox"),
        ({"method": "kto", "label_smoothing": 0.1}, "label_smoothing applies only to method dpo"),
        ({"method": "dpo", "w_desirable": 2.0}, "w_desirable applies only to method kto"),
        ({"method": "kto", "train_batch_size": 1, "micro_train_batch_size": 1}, "set it to 2 or more"),
    ],
)
def test_wrong_loops(tmp_path: Path, loop: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recipe(tmp_path, **loop)


def test_a_round_that_was_not_started_takes_the_rows_that_came_since(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, QUESTIONS[0])  # a row that the round cannot use
    assert "has 0 new rows that it can use" in loop_state(recipe(tmp_path), "loop").why_not()
    begin(recipe(tmp_path), loop_state(recipe(tmp_path), "loop"))  # whoever begins all the same
    say(inbox, "a")
    assert rows(one_round(recipe(tmp_path)).plan["loop.round1"]) == ["a"]


def test_a_plan_that_is_not_run_takes_no_rows_from_the_loop(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    plan(recipe(tmp_path))  # as serve, a dry run, or a report does
    say(inbox, "b")
    wants = recipe(tmp_path, min_new_rows=2)
    assert loop_state(wants, "loop").why_not() == ""
    assert rows(one_round(wants).plan["loop.round1"]) == ["a", "b"]


def test_the_first_round_may_be_refused(tmp_path: Path, inbox: Inbox) -> None:
    gated = recipe(tmp_path, gate=0.5)
    say(inbox, "poison")
    one_round(gated, accuracy=0.1)
    say(inbox, "b")
    found = refuse(gated, loop_state(gated, "loop"), "poisoned")
    assert found.number == 2
    done = one_round(gated)
    assert rows(done.plan["loop.round2"]) == ["b"] and done.plan["loop.round2"].stages == {"sft": "sft"}
    # the recipe's one round is refused, and what depends on it needs a model
    assert plan(gated).aliases["loop"] == "loop.round2.dpo"


def test_gates_on_a_loop_whose_rounds_are_all_refused_are_planned(tmp_path: Path, inbox: Inbox) -> None:
    gates = (Gate(metric="win_rate_vs_parent/loop", min=0.5),)
    of = changed(recipe(tmp_path, gate=0.5), "evaluation", gates=gates)
    say(inbox, "poison")
    one_round(of, accuracy=0.1)
    refuse(of, loop_state(of, "loop"), "poisoned")
    (gate,) = plan(of)["evaluation"].config.gates
    assert gate.metric == "win_rate/loop.round2", "its parent is the baseline"


def test_an_evaluation_judges_the_last_rounds_alone(tmp_path: Path, inbox: Inbox) -> None:
    gates = (Gate(metric="win_rate_vs_parent/loop", min=0.5),)
    of = changed(recipe(tmp_path), "evaluation", last_rounds=1, gates=gates)
    for name in ("a", "b", "c"):
        say(inbox, name)
        found = begin(of, loop_state(of, "loop")).plan["evaluation"].config
        do(loop_state(of, "loop").plan)
        finish(loop_state(of, "loop"))
    assert found.models == ("loop.round3",) and found.parents == {"loop.round3": "loop.round2.dpo"}  # type: ignore[union-attr]
    assert found.gates[0].metric == "win_rate_vs_parent/loop.round3"


def test_a_gate_that_is_not_about_the_round_refuses_none(tmp_path: Path, inbox: Inbox) -> None:
    of = changed(recipe(tmp_path), "sft", gates=(Gate(metric="loss", max=0.5),))
    say(inbox, "a")
    found = begin(of, loop_state(of, "loop"))
    do(found.plan, accuracy=0.1)
    say(inbox, "b")
    state = loop_state(of, "loop")
    assert [verdict.stage for verdict in state.failed][:1] == ["sft"]
    assert not state.held
    assert not state.renewed
    assert not state.turned_down


def test_a_recipe_may_name_a_refused_round(tmp_path: Path, inbox: Inbox) -> None:
    of = changed(recipe(tmp_path), "evaluation", models=("loop.round1", "loop.round2", "loop"))
    say(inbox, "a")
    planned = plan(with_rounds(of, "loop", 2), {}, {}, {"loop.round1"})
    assert planned["evaluation"].config.models == ("loop.round2",)  # type: ignore[attr-defined]
    assert planned.aliases["loop.round1"] == "sft"


def test_a_publication_of_a_refused_round_is_left_out_with_its_gates(tmp_path: Path, inbox: Inbox) -> None:
    of = recipe(tmp_path)
    early = Publication(model="loop.round1", evaluation="evaluation", gates=(Gate(metric="files", min=1),))
    of = of.model_copy(update={"stages": of.stages | {"early": early}})
    say(inbox, "a")
    planned = plan(with_rounds(of, "loop", 2), {}, {}, {"loop.round1"})
    assert "early" not in [node.name for node in planned.nodes]


def test_one_run_after_nights_goes_by_the_loops_record(tmp_path: Path, inbox: Inbox) -> None:
    say(inbox, "a")
    first = one_round(recipe(tmp_path)).plan["loop.round1"].digest
    say(inbox, "b")
    one_round(recipe(tmp_path))
    assert plan(recipe(tmp_path))["loop.round1"].digest == first
    assert all(node.done for node in plan(recipe(tmp_path, rounds=2)).stages_of("loop"))


def test_an_inbox_is_the_same_by_every_path_and_another_one_in_its_place_is_not(
    tmp_path: Path, inbox: Inbox
) -> None:
    say(inbox, "a")
    one_round(recipe(tmp_path))
    (tmp_path / "below").mkdir()
    other = recipe(tmp_path, feedback={"sources": f"{tmp_path}/below/../night.inbox"})
    say(inbox, "b")
    assert rows(one_round(other).plan["loop.round2"]) == ["b"]
    shutil.rmtree(inbox.folder)
    replaced = Inbox(inbox.folder)
    say(replaced, "n1", "n2", "n3", "n4")
    assert rows(one_round(recipe(tmp_path)).plan["loop.round3"]) == ["n1", "n2", "n3", "n4"]


def test_prompts_of_a_sampled_loop_are_new_in_each_round(tmp_path: Path, inbox: Inbox) -> None:
    loop = dict(
        stage="iterative_dpo", reward="org/r", policy="base", prompts={"sources": str(inbox.folder)}, rounds=1
    )
    of = Recipe(
        name="night", base_model="org/base", artifacts=str(tmp_path / "artifacts"), stages={"loop": loop}
    )
    say(inbox, "a")
    found = begin(of, loop_state(of, "loop"))
    do(found.plan)
    finish(found)
    assert "round 2 waits for feedback" in loop_state(of, "loop").why_not()
    say(inbox, "b")
    found = begin(of, loop_state(of, "loop"))
    config: Any = found.plan["loop.round2.preferences"].config
    assert config.first_prompt == 0 and "prompt-1-2" in config.prompts.sources[0].path


def test_drift_compares_the_prompts_of_each_round(tmp_path: Path, inbox: Inbox) -> None:
    of = recipe(tmp_path)
    drift = dict(
        model="loop", prompts={"sources": str(inbox.folder)}, past_prompts={"sources": "train.jsonl"}
    )
    of = Recipe(**of.model_dump() | {"stages": {**of.stages, "drift": {"stage": "drift", **drift}}})
    say(inbox, "a")
    plan(of)  # as serve does at its start
    for expected in (["a"], ["a", "b"], ["a", "b", "c"]):
        say(inbox, expected[-1])
        planned = one_round(of).plan
        path = Path(planned["drift"].config.prompts.sources[0].path)  # type: ignore[attr-defined]
        assert [
            json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()
        ] == expected


def test_the_status_says_how_a_refused_round_ends(tmp_path: Path, inbox: Inbox) -> None:
    gated = recipe(tmp_path, gate=0.5)
    say(inbox, "poison")
    one_round(gated, accuracy=0.1)
    told = next_of(loop_state(gated, "loop"), running=False)
    assert told.startswith("Round 1 is stopped by a gate (stage loop.round1.dpo: accuracy is 0.1")
    assert "send more feedback" in told
    say(inbox, "b")
    told = next_of(loop_state(gated, "loop"), running=False)
    assert told.endswith(": the next run skips this round and starts another one.")
