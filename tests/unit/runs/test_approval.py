"""A person's decision on a stage: asked once, decided once, and too late after its time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import Gate
from rlhf_core.runs import approval_record as approval
from rlhf_core.runs.approval_record import FILE, Approval, ask, asked_in, decide

DAY = timedelta(days=1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts" / "stages" / "evaluation-0123456789abcdef"
    folder.mkdir(parents=True)
    return folder


def question(run_dir: Path, within: timedelta = DAY, run: str | None = None) -> Approval:
    return ask(run_dir, "evaluation", run_dir.parents[1] / "night", within, run)


def expire(run_dir: Path) -> None:
    found = Approval.read(run_dir / FILE)
    assert found is not None
    (run_dir / FILE).write_text(found.model_copy(update={"until": datetime.now(UTC) - DAY}).model_dump_json())


def test_a_question_is_asked_once(run_dir: Path) -> None:
    first = question(run_dir)
    assert first.state() == "asked"
    assert first.until - first.asked == DAY
    assert "waits for a person until" in first.told()
    assert question(run_dir, 7 * DAY) == first
    with_run = question(run_dir, run="run-1")  # the first run of a server takes it over
    assert with_run == first.model_copy(update={"run": "run-1"})
    assert question(run_dir, run="run-2") == with_run


@pytest.mark.parametrize(
    ("approved", "told"), [(True, "approved by ann (good)"), (False, "refused by ann (good)")]
)
def test_a_decision_is_kept_and_is_not_replaced_by_the_other(
    run_dir: Path, approved: bool, told: str
) -> None:
    question(run_dir)
    made = decide(run_dir, approved, "ann", "good")
    assert made.told() == told and decide(run_dir, approved, "bob") == made and question(run_dir) == made
    with pytest.raises(ValueError, match="already: make the stage anew"):
        decide(run_dir, not approved, "bob")


def test_what_was_not_asked_or_is_too_late_is_a_sentence(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="nobody asked for an approval"):
        decide(run_dir, True, "ann")
    question(run_dir)
    expire(run_dir)
    assert question(run_dir).state() == "late"
    with pytest.raises(ValueError, match=r"nobody approved it until .*: give --late"):
        decide(run_dir, True, "ann")
    assert decide(run_dir, True, "ann", late=True).state() == "approved"


def test_questions_are_found_by_their_recipe(run_dir: Path) -> None:
    question(run_dir)
    artifacts = run_dir.parents[1]
    assert [(folder, found.stage) for folder, found in asked_in(artifacts / "night")] == [
        (run_dir, "evaluation")
    ]
    assert asked_in(artifacts / "day") == []


def test_a_decision_cut_off_is_no_decision(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question(run_dir)

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(approval, "write_text", killed)
        decide(run_dir, True, "ann")
    assert question(run_dir).state() == "asked" and decide(run_dir, False, "ann").state() == "refused"


@pytest.mark.parametrize(
    ("gate", "sentence"),
    [
        ({}, "a gate needs a metric with a bound, or approve"),
        ({"approve": {}, "metric": "loss"}, "write two gates"),
        ({"approve": {}, "min": 1}, "write two gates"),
        ({"approve": {}, "on_fail": "warn"}, "would ignore a refused approval:"),
        ({"approve": {"within": "soon"}}, "not a duration: write minutes, hours"),
        ({"approve": {"within": "0h"}}, "not a duration:"),
        ({"approve": {"by": "robot"}}, "Input should be 'human'"),
    ],
)
def test_wrong_gates(gate: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Gate.model_validate(gate)


@pytest.mark.parametrize(
    ("within", "time"), [("30m", timedelta(minutes=30)), ("48h", 2 * DAY), ("7d", 7 * DAY), ("2w", 14 * DAY)]
)
def test_times(within: str, time: timedelta) -> None:
    gate = Gate.model_validate({"approve": {"within": within}})
    assert gate.approve is not None and gate.approve.time == time
