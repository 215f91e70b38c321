"""A gate that wants a person's approval: what waits, what goes on after a yes, a no and a deadline, in one
run and in a loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import flows.cli
from flows.alignment import alignment
from flows.loops import loop
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import ApprovalAwaited, GateFailed
from rlhf_core.runs.approval_record import FILE, Approval
from tests.support.writing_stages import ORDER, attempts, statuses

pytestmark = pytest.mark.usefixtures("prefect")
GATE = "reward_model.gates=[{approve: {within: 48h}}]"
OF_LOOP = "evaluation.gates=[{approve: {within: 48h}}]"


def approve(*given: str) -> int:
    return flows.cli.main(["approve", "artifacts/tiny", *given])


def expire() -> None:
    for file in Path("artifacts/stages").glob(f"*/{FILE}"):
        found = Approval.read(file)
        assert found is not None
        file.write_text(
            found.model_copy(update={"until": datetime.now(UTC) - timedelta(days=1)}).model_dump_json()
        )


def test_what_depends_on_it_waits_and_goes_on_after_a_yes(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.raises(ApprovalAwaited, match="stage reward_model: waits for a person until"):
            alignment(recipe(GATE))
    assert attempts() == ORDER[:2] and statuses()["evaluation"] == "not run"
    page = Path("artifacts/tiny/report.html").read_text()
    assert "waits: what depends on reward_model is not started" in page
    assert approve("--by", "ann", "--reason", "looks good") == 0
    assert (
        "reward_model: approved by ann (looks good)\nrun the recipe again to continue"
        in capsys.readouterr().out
    )
    alignment(recipe(GATE))
    assert attempts() == ORDER
    summary = json.loads(Path("artifacts/tiny/summary.json").read_text())
    (gate,) = summary["stages"][1]["gates"]
    assert gate["passed"] and gate["said"] == "approved by ann (looks good)"


@pytest.mark.parametrize("late", [False, True])
def test_a_no_or_no_answer_starts_nothing(
    recipe: Callable[..., Recipe], late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ApprovalAwaited):
        alignment(recipe(GATE))
    if late:
        expire()
        assert approve() == 2
        assert "no stage waits for an approval (reward_model: nobody approved it" in capsys.readouterr().err
    else:
        assert approve("--refuse", "--by", "ann") == 0
    with pytest.raises(GateFailed, match="nobody approved it until" if late else "refused by ann"):
        alignment(recipe(GATE))
    assert attempts() == ORDER[:2]
    assert "failed: the run stopped here" in Path("artifacts/tiny/report.html").read_text()
    if late:
        assert approve("--late", "--by", "ann") == 0
        alignment(recipe(GATE))
        assert attempts() == ORDER


def test_the_command_ends_with_a_code_of_its_own(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flows.cli.main(["run", "recipe.yaml", GATE]) == 4
    told = capsys.readouterr()
    assert "alignflow approve" in told.err and "1 waits" in told.out
    assert flows.cli.main(["run", "recipe.yaml", GATE, "--dry-run"]) == 0
    assert flows.cli.main(["approve", "artifacts/other"]) == 2
    assert "this folder does not exist:" in capsys.readouterr().err
    assert approve("--stage", "sft") == 2
    assert "no approval of sft was requested; stages with a request: reward_model" in capsys.readouterr().err


def test_a_refused_round_is_left_out_and_the_next_one_starts_from_the_one_before(
    recipe: Callable[..., Recipe],
) -> None:
    def night() -> str:
        return str(loop(recipe(OF_LOOP), return_state=True).message)

    assert "round 1: stage evaluation: waits for a person" in night()
    assert "round 1: stage evaluation: waits for a person" in night()  # the next night
    assert approve("--by", "ann") == 0
    assert "round 2: stage evaluation: waits for a person" in night()
    assert approve("--refuse", "--by", "ann", "--reason", "rude") == 0
    before = attempts()
    assert "round 3: stage evaluation: waits" in night()
    assert [name for name in attempts()[len(before) :]] == [
        "loop.round3.preferences",
        "loop.round3.dpo",
        "evaluation",
    ]
    (config,) = Path("artifacts/stages").glob("loop.round3.dpo-*/config.json")
    assert json.loads(config.read_text())["config"]["policy"] == "loop.round1.dpo"
    expire()
    assert "round 4: stage evaluation: waits" in night()  # round 3 was not approved in time
    record = json.loads(Path("artifacts/tiny/loop.json").read_text())
    assert [done["refused"] for done in record["rounds"]][:2] == [
        "",
        "stage evaluation: refused by ann (rude)",
    ]
    assert record["rounds"][2]["refused"].startswith("stage evaluation: nobody approved it until")
    assert flows.cli.main(["loop", "status", "recipe.yaml", OF_LOOP]) == 0
