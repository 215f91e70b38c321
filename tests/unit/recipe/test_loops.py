"""Which round of a loop is next, from what lies on disk: no finished round is repeated and none is skipped,
whatever happened."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.cli.results.artifacts_history import survey
from rlhf_core.config import Recipe
from rlhf_core.recipe.loops.loop_choice import loop_of, with_rounds
from rlhf_core.recipe.loops.loop_record import FILE, folder_of, loop_lock, read
from rlhf_core.recipe.loops.loop_state import loop_state
from rlhf_core.recipe.loops.round_steps import begin, finish
from rlhf_core.recipe.plan import Node, Plan, plan
from rlhf_core.runs.run_dir import Outcome, RunDir

STAGES: dict[str, Any] = {
    "sft": {"data": {"sources": "train.jsonl"}},
    "loop": dict(stage="iterative_dpo", reward="org/reward", prompts={"sources": "prompts.jsonl"}, rounds=1),
    "evaluation": {"models": ["loop"], "questions": {"path": "q.jsonl"}},
    "publication": dict(model="loop", evaluation="evaluation", repo_id="me/model", round_branch="round-{}"),
}
SOON = datetime.now(UTC) + timedelta(days=1)


def recipe(place: Path, rates: dict[str, Any] | None = None, **loop: Any) -> Recipe:
    stages = STAGES | {"loop": STAGES["loop"] | loop, "evaluation": STAGES["evaluation"] | (rates or {})}
    return Recipe(name="night", base_model="org/base", artifacts=str(place), stages=stages)


def do(planned: Plan, node: Node, rate: float = 0.6) -> None:
    """What a stage leaves behind."""
    run = RunDir(node.run_dir)
    if run.result() is not None:
        return
    run.prepare(planned.request(node))
    rounds = [name for name in getattr(node.config, "models", ()) if ".round" in name]
    metrics = {f"win_rate/{name}": rate + 0.01 * i for i, name in enumerate(rounds)}
    (run / "checkpoint").write_text(node.digest)
    run.finish(planned.request(node), Outcome(metrics, {"checkpoint": "checkpoint"}), 1.0)


def one_round(of: Recipe, only: int | None = None, rate: float = 0.6) -> dict[str, str]:
    """Trains the next round, or `only` so many of its plan's stages that are not done; the digests of all
    stages."""
    found = loop_state(of, "loop")
    begin(of, found)
    for node in [node for node in found.plan.nodes if not node.done][:only]:
        do(found.plan, node, rate)
    if only is None:
        finish(found)
    return {node.name: node.digest for node in found.plan.nodes}


def trained(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "stages").glob("loop.*"))


def test_rounds_follow_each_other_with_the_digests_of_one_run_of_them_all(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        assert loop_state(recipe(tmp_path), "loop").number == number
        digests = one_round(recipe(tmp_path))
    at_once = plan(with_rounds(recipe(tmp_path), "loop", 3))
    assert {
        node.name: node.digest for node in at_once.nodes if node.name.startswith("loop.")
    }.items() <= digests.items()
    assert len(trained(tmp_path)) == 6, "nothing was trained twice"
    record = read(tmp_path / "night", "loop")
    assert [done.win_rate for done in record.rounds] == pytest.approx([0.6, 0.61, 0.62])
    assert record.begun is None
    assert list(record.rounds[1].stages) == [
        "loop.round2.preferences",
        "loop.round2.dpo",
        "publication.round2",
    ]


@pytest.mark.parametrize("stages", range(6))
def test_a_round_that_was_cut_off_anywhere_is_the_next_one(tmp_path: Path, stages: int) -> None:
    one_round(recipe(tmp_path))
    cut = one_round(recipe(tmp_path), stages)
    found = loop_state(recipe(tmp_path), "loop")
    assert found.number == (2 if stages < 5 else 3), "preferences, dpo, evaluation and two publications"
    if stages < 5:
        assert one_round(recipe(tmp_path)) == cut
    assert loop_state(recipe(tmp_path), "loop").number == 3 and len(trained(tmp_path)) == 4


def test_an_edited_recipe_counts_for_the_rounds_to_come(tmp_path: Path) -> None:
    before = [one_round(recipe(tmp_path)) for _ in range(2)][-1]
    after = one_round(recipe(tmp_path, beta=0.7))
    assert {name: after[name] for name in after if ".round1" in name or ".round2" in name} == {
        name: before[name] for name in before if ".round" in name
    }
    found = loop_state(recipe(tmp_path, beta=0.7), "loop")
    request = found.plan.request(found.plan["loop.round3"])
    # round 3 starts from the round 2 that there is
    assert before["loop.round2.dpo"] in request.inputs["loop.round2.dpo"]
    assert len(trained(tmp_path)) == 6


@pytest.mark.parametrize(("stages", "repeated"), [(1, 0), (2, 0), (3, 0)])
def test_an_edit_in_the_middle_of_a_round_trains_no_round_twice(
    tmp_path: Path, stages: int, repeated: int
) -> None:
    cut = one_round(recipe(tmp_path), 1 + stages)  # the SFT too
    after = one_round(recipe(tmp_path, beta=0.7))
    same = [name for name in cut if name.startswith("loop.") and cut[name] == after[name]]
    # what was trained is kept; what was not takes the new recipe
    assert len(same) == (2 if stages > 1 else 1)
    assert len(trained(tmp_path)) == 2 + repeated


def test_a_round_that_a_gate_holds_may_be_trained_anew_under_another_recipe(tmp_path: Path) -> None:
    gate = {"gates": [{"metric": "win_rate/loop.round1", "min": 0.9}]}
    cut = one_round(recipe(tmp_path, gate), 4)
    held = loop_state(recipe(tmp_path, gate), "loop")
    assert held.number == 1 and held.failed and {n.name: n.digest for n in held.plan.nodes} == cut
    assert (
        loop_state(recipe(tmp_path, gate, beta=0.7), "loop").plan["loop.round1"].digest
        != cut["loop.round1.dpo"]
    )
    assert loop_state(recipe(tmp_path), "loop").plan["loop.round1"].digest == cut["loop.round1.dpo"]


def test_rounds_of_another_command_count(tmp_path: Path) -> None:
    planned = plan(with_rounds(recipe(tmp_path), "loop", 3))
    for node in planned.nodes:
        do(planned, node)
    found = loop_state(recipe(tmp_path), "loop")
    assert found.number == 4 and [done.begun for done in found.record.rounds] == [None] * 3
    one_round(recipe(tmp_path))
    assert len(read(tmp_path / "night", "loop").rounds) == 4 and len(trained(tmp_path)) == 8


def test_a_finished_round_that_is_gone_is_told_and_nothing_is_trained(tmp_path: Path) -> None:
    one_round(recipe(tmp_path))
    found = loop_state(recipe(tmp_path), "loop")
    (found.plan["loop.round1"].run_dir / "checkpoint").unlink()
    with pytest.raises(
        ValueError,
        match=r"loop\.round1\.dpo-\w+ of a finished round is missing or incomplete: restore it, or remove",
    ):
        loop_state(recipe(tmp_path, beta=0.7), "loop")
    (tmp_path / "night" / FILE).unlink()
    assert loop_state(recipe(tmp_path), "loop").number == 1


def test_why_not_now(tmp_path: Path) -> None:
    for _ in range(2):
        one_round(recipe(tmp_path))
    found = loop_state(recipe(tmp_path), "loop")
    assert found.why_not() == found.why_not(3, 0.005, SOON) == ""
    assert found.why_not(2) == "2 rounds are done, and --max-rounds (parameter max_rounds of the flow) is 2"
    told = found.why_not(min_gain=0.02)
    assert "the win rate went from 0.600 to 0.610 in round 2: it does not rise by more than 0.02" in told
    assert "round 2 was begun and finished after" in found.why_not(due=datetime.now(UTC) - timedelta(hours=1))


def test_a_round_is_compared_with_the_one_before_it_by_one_evaluation(tmp_path: Path) -> None:
    one_round(recipe(tmp_path))
    one_round(recipe(tmp_path), rate=0.5)  # another day's judge is harder on both: 0.50 and 0.51
    found = loop_state(recipe(tmp_path), "loop")
    assert [(done.before, done.win_rate) for done in found.record.rounds] == [(None, 0.6), (0.5, 0.51)]
    assert found.why_not(min_gain=0.005) == ""
    assert "from 0.500 to 0.510 in round 2" in found.why_not(min_gain=0.02)


def holder(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Another process that holds the loop for so long."""
    script = "import pathlib, sys, time\nfrom rlhf_core.recipe.loops.loop_record import loop_lock\n"
    script += (
        "with loop_lock(pathlib.Path(sys.argv[1])) as mine:\n    print(mine, flush=True)\n   "
        " time.sleep(float(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(seconds)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert other.stdout is not None and other.stdout.readline() == b"True\n"
    return other


def test_who_looks_whether_a_loop_is_free_stops_nobody(tmp_path: Path) -> None:
    folder = folder_of(recipe(tmp_path))
    other = holder(folder, 0.3)
    with loop_lock(folder, seconds=60) as mine:
        assert mine
    other.communicate()


def test_one_process_at_a_time_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    folder = folder_of(recipe(tmp_path))
    other = holder(folder, 60)
    with loop_lock(folder) as mine:
        assert not mine
    other.kill()
    other.communicate()
    with loop_lock(folder) as mine:
        assert mine


def test_which_loop(tmp_path: Path) -> None:
    two = recipe(tmp_path).model_copy(
        update={"stages": recipe(tmp_path).stages | {"more": recipe(tmp_path).stages["loop"]}}
    )
    with pytest.raises(ValueError, match=r"has 2 loops \(loop, more\): say which one with `stage`"):
        loop_of(two)
    assert loop_of(two, "more") == "more"
    with pytest.raises(ValueError, match="unknown loop 'mre'; did you mean more"):
        loop_of(two, "mre")
    one_round(recipe(tmp_path))
    with pytest.raises(ValueError, match="is of the loop loop, not of more"):
        loop_state(two, "more")
    (tmp_path / "night" / FILE).write_text("{")
    with pytest.raises(ValueError, match="cannot be read: restore it"):
        loop_state(recipe(tmp_path), "loop")


def test_gc_keeps_what_a_loop_needs(tmp_path: Path) -> None:
    one_round(recipe(tmp_path))
    one_round(recipe(tmp_path, beta=0.7))
    # the model of the last round, elsewhere
    assert {item.path.name.partition("-")[0] for item in survey(tmp_path)[1]} == {"publication"}
    (tmp_path / "night" / FILE).unlink()
    assert len(survey(tmp_path)[1]) == len(list((tmp_path / "stages").iterdir()))
