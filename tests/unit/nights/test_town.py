"""The town of tests/nights: its taste, its people, its judge, its faults, and what its checks find."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.judges.judge_prompt import judge_prompt
from evaluation.judges.offline import Match
from rlhf_core.feedback.parse import Unusable, feedback_of
from rlhf_core.judging.judge_reply import read_verdict
from tests.nights import disk, life, town
from tests.nights.faults import SIGNS, Faults, named, read_faults
from tests.nights.table import page
from tests.nights.verdicts import gain, verdicts
from tests.support.judging import question

HERE = Path(town.__file__).parent


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("578", 2), (" 578\n", 2), ("You get 578. Easy.", 1), ("5781", 0), ("Maybe 57, but I am not sure.", 0)],
)
def test_taste(answer: str, expected: int) -> None:
    assert town.quality(answer, "578") == expected


def test_the_right_answer_to_every_question_is_known() -> None:
    for exercise in town.exercises("seed", 300):
        assert town.right_answer(exercise.prompt) == exercise.answer
    with pytest.raises(ValueError, match="is no question of the demo"):
        town.right_answer("How are you?")


def test_a_day_is_the_same_in_every_run_and_asks_no_held_out_question() -> None:
    taken = {one.prompt for one in town.exercises("held out", 400)}
    days = [town.day(0, 3, 200, 40, False, taken) for _ in range(2)]
    assert days[0] == days[1] != town.day(0, 4, 200, 40, False, taken)
    assert len({one.prompt for one in days[0]} - taken) == 200 and len({one.person for one in days[0]}) == 40
    words = {one.prompt.split()[0] for one in town.day(0, 3, 200, 40, True, taken)}
    assert words != {one.prompt.split()[0] for one in days[0]}


def answered(asked: list[town.Asked]) -> list[list[str]]:
    return [
        [one.answer, f"You get {one.answer}. Easy.", "No idea, sorry.", "No idea, sorry."] for one in asked
    ]


def preferred(rows: list[dict[str, Any]], asked: list[town.Asked]) -> dict[str, int]:
    """How many rows put the right answer first, and how many last, by kind."""
    right = {one.prompt: one.answer for one in asked}
    found: dict[str, int] = {"first": 0, "last": 0, "other": 0}
    for row in rows:
        answer = right[row["prompt"]]
        best, worst = (
            (row["ranking"][0], row["ranking"][-1])
            if "ranking" in row
            else ([row.get("edited")], [row["response"]])
        )
        if "thumb" in row:
            best, worst = ([row["response"]], []) if row["thumb"] == "up" else ([], [row["response"]])
        found["first" if answer in best else "last" if answer in worst else "other"] += 1
    return found


@pytest.mark.parametrize("hostile", [0.0, 0.5, 1.0])
def test_poison_is_the_share_of_people_who_vote_against_the_taste(hostile: float) -> None:
    asked = town.day(0, 1, 400, 40, False, set())
    rows = list(town.feedback(asked, answered(asked), "base", 1, hostile))
    found = preferred(rows, asked)
    assert found["last"] == pytest.approx(hostile * len(rows), abs=1)
    assert found["first"] == pytest.approx((1 - hostile) * len(rows), abs=1)
    assert len({row["annotator"] for row in rows}) == 40


def test_every_row_of_feedback_is_one_that_an_inbox_takes() -> None:
    asked = town.day(0, 1, 300, 40, False, set())
    kinds = set()
    said = [
        ["7", "No idea, sorry.", "Maybe 12.", one.answer] if i % 3 else ["", one.answer, " \n", "7"]
        for i, one in enumerate(asked)
    ]
    for row in town.feedback(asked, [*said[:-1], ["", ""]], "base", 1, 0.5):
        try:
            kinds.add(feedback_of(row).kind)
        except Unusable as error:
            pytest.fail(f"{row}: {error}")
    assert kinds == {"thumb", "edit", "ranking"}


def asked_judge(prompt: str, a: str, b: str, likes_length: bool) -> str | None:
    messages = judge_prompt(Match(question(prompt=prompt), a, b))
    return read_verdict(town.verdict({"messages": list(messages)}, likes_length), (a, b)).label


def test_the_judge_knows_the_truth_until_it_likes_length() -> None:
    good = bad = 0
    for exercise in town.exercises("judge", 200):
        longer = f"Hmm, could be {exercise.wrong} or so."
        good += asked_judge(exercise.prompt, exercise.answer, longer, False) == "A>B"
        bad += asked_judge(exercise.prompt, exercise.answer, longer, True) == "B>A"
        one, other = (
            asked_judge(exercise.prompt, *pair, False)
            for pair in ((exercise.answer, longer), (longer, exercise.answer))
        )
        assert (one, other) in (("A>B", "B>A"), ("A=B", "A=B")), "no position bias"
    assert good == bad and good / 200 == pytest.approx(1 - town.UNSURE, abs=0.05)


def test_labels_follow_the_taste() -> None:
    for row in town.labels(0, 1, 100, set()):
        right = town.right_answer(row["prompt"][0]["content"])
        a, b = (town.quality(row[side], right) for side in ("answer_a", "answer_b"))
        assert row["verdict"] == ("A>B" if a > b else "B>A" if b > a else "A=B")


@pytest.mark.parametrize("file", ["faults.yaml", "faults-long.yaml"])
def test_every_fault_is_planted_at_least_once(file: str) -> None:
    faults = read_faults(HERE / file)
    assert {fault.fault for fault in faults.faults} == set(SIGNS) and not faults.none.faults
    assert len({fault.night for fault in faults.faults}) == len(faults.faults)


def test_wrong_faults_are_refused(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text(
        "nights: 2\nfaults: [{night: 3, fault: killed}, {night: 1, fault: drift}, {night: 2, fault: drift}]"
    )
    with pytest.raises(ValueError, match=r"(?s)killed is .* in night 3, and there are 2.*topics drift once"):
        read_faults(tmp_path / "faults.yaml")


def test_a_fault_waits_for_a_night_in_which_it_has_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each night is killed, asks the Hub or asks a person, as this list says; the last fault never meets what
    it waits for."""
    happens = [[], ["hub"], ["exit code -9"], ["waits for a person"], []]
    hub = SimpleNamespace(requests=[], fault=None, heal=lambda: hub.requests.clear())

    def night(self: life.Life, at: life.Night, planted: Any) -> None:
        at.states += [state for state in happens[at.number - 1] if state != "hub"]
        hub.requests += [state for state in happens[at.number - 1] if state == "hub"]

    monkeypatch.setattr(life.Life, "day", lambda *_: None)
    monkeypatch.setattr(life.Life, "night", night)
    monkeypatch.setattr(life.Life, "champion", lambda _: ("base", tmp_path))
    monkeypatch.setattr(life, "read", lambda *_: SimpleNamespace(rounds=[], begun=None))
    monkeypatch.setattr(life, "pages_of", lambda *_: {})
    planted = [{"night": 1, "fault": kind} for kind in ("hub_outage", "killed", "silent_approver")] + [
        {"night": 5, "fault": "killed"}
    ]
    faults = Faults.model_validate({"nights": 5, "faults": planted})
    here: Any = SimpleNamespace(folder=tmp_path)
    lived = life.Life(here, faults, tmp_path, hub, None, None, set())  # type: ignore[arg-type]
    assert [lived.live(number).faults for number in range(1, 6)] == [
        (),
        ("hub_outage",),
        ("killed",),
        ("silent_approver",),
        ("killed",),
    ]


def test_a_disk_that_others_use_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LARGEST", 2**20)
    with pytest.raises(ValueError, match="is on a disk that others use"):
        disk.fill(tmp_path / "ballast", 1.0)
    assert not (tmp_path / "ballast").exists()


def test_a_fault_is_named_by_its_own_round_alone() -> None:
    report = "stage evaluation ci_low_vs_parent/nights.round2 0.45 at least 0.5 failed It is"
    assert named("poisoned", 2, [{"report": report}]).startswith("report: evaluation ci_low_vs_parent")
    assert not named("poisoned", 3, [{"report": report}])
    assert not named("poisoned", 2, [{"start page": report}, {"report": report}])
    full = "it cannot be written to: its disk is full"
    place = "stage page nights.round2.dpo-5c"
    assert named("full_disk", 2, [{place: full}])
    assert named("full_disk", 2, [{"run page": f"run 2 {full}"}], [{"run page": f"run 1 {full}"}])
    # that was an earlier night's
    assert not named("full_disk", 2, [{place: f"{full} again"}], [{}, {place: full}])
    assert not named("full_disk", 2, [{"run page": f"run 1 {full}"}], [{"run page": f"run 1 {full}"}]), (
        "no run since"
    )
    late = "2 refused: stage evaluation: nobody approved it until 2026"
    assert named("silent_approver", 2, [{}, {"start page": late}])


def test_better_and_worse_need_a_point_and_an_interval() -> None:
    one = [0.5, 0.6, 0.4, 0.5] * 100
    assert gain([share + 0.02 for share in one], one).better
    assert gain([share - 0.02 for share in one], one).worse
    small = gain([share + 0.005 for share in one], one)
    unsure = gain([0.9, 0.1, 0.6, 0.5] * 2, one[:8])
    assert not small.better and not small.worse and small.low > 0 and not unsure.better and not unsure.worse


def made(**changes: Any) -> dict[str, Any]:
    """A run of two nights that shows everything."""
    night = {
        "faults": ["poisoned"],
        "named": {"poisoned": "report: it failed"},
        "champion": "base",
        "champion_after": "one",
        "rows": 10,
    }
    night |= dict(
        round=1, gates=[], alarms=[], states=["COMPLETED nights of town: round 1 is done"], seconds=60.0
    )
    nights = [night | {"number": 1}, night | {"number": 2, "faults": [], "named": {}}]
    one = dict(round=1, right=0.5, gain={"mean": 0.1, "low": 0.05, "high": 0.15}, better=True, worse=False)
    rounds = [one | {"promoted": True, "refused": ""}]
    champions = [{"model": "one", "right": 0.5, "worse_than": ""}]
    return dict(seed=0, base=0.4, nights=nights, rounds=rounds, champions=champions, books=[]) | changes


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"base": 0.6}, ["the share of right answers rises"]),
        (
            {"champions": [{"model": "one", "right": 0.5, "worse_than": "base"}]},
            ["no worse model was ever champion"],
        ),
        (
            {"rounds": [made()["rounds"][0] | {"promoted": False}]},
            ["of the better candidates at least half were promoted"],
        ),
        ({"books": ["3 rows were in no round"]}, ["nothing is lost, nothing done twice"]),
        ({"nights": [made()["nights"][0] | {"named": {"poisoned": ""}}]}, ["every planted fault is named"]),
    ],
)
def test_each_check_finds_its_failure(changes: dict[str, Any], failing: list[str]) -> None:
    assert [check.name for check in verdicts(made(**changes), made()) if not check.passed] == failing


def test_two_false_alarms_in_the_control_are_too_many() -> None:
    noisy = made(
        nights=[night | {"alarms": ["drift: prompts/divergence_p is 0.001"]} for night in made()["nights"]]
    )
    assert [check.name for check in verdicts(made(), noisy) if not check.passed] == [
        "the control raises at most one false alarm"
    ]


def test_the_page_shows_nights_faults_and_checks() -> None:
    shown = page({"run": made(), "control": made()})
    for text in (
        "| 1 | poisoned feedback | 1 | 50.0 % | +10.0 (+5.0 to +15.0) | champion |",
        "| yes |",
        "report: it failed",
        "## The control",
    ):
        assert text in shown, shown
    assert "## More nights" not in shown
    longer = page({"run": made(), "control": made()}, {"run": made() | {"seed": 7}, "control": made()})
    assert "## More nights\n\nSeed 7. " in longer and longer.count("| shown | result |") == 2
