"""A loop goes on from the champion: after a rollback by hand, and after a move of the champion that was cut
off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import flows.cli
from flows.loops import loop
from rlhf_core.config import Recipe
from rlhf_core.stages.publication import champion_record as module
from rlhf_core.stages.publication.champion_record import champions_of
from tests.support.writing_stages import attempts

pytestmark = pytest.mark.usefixtures("prefect")
FOLDER = Path("artifacts/tiny")


@pytest.fixture
def night(recipe: Callable[..., Recipe]) -> Callable[[], str]:
    with Path("recipe.yaml").open("a") as file:
        file.write("  publication: {model: loop, evaluation: evaluation, champion: true}\n")
    return lambda: str(loop(recipe("loop.rounds=1"), return_state=True).message)


def champion() -> str:
    now = champions_of(FOLDER.absolute()).now
    return now.model if now else ""


def test_the_next_round_starts_from_the_champion_after_a_rollback(night: Callable[[], str]) -> None:
    for number in (1, 2):
        assert f"round {number} is done" in night() and champion() == f"loop.round{number}.dpo"
    assert flows.cli.main(["rollback", str(FOLDER), "--reason", "rude answers"]) == 0
    assert champion() == "loop.round1.dpo"
    assert "round 3 is done" in night() and champion() == "loop.round3.dpo"
    (config,) = Path("artifacts/stages").glob("loop.round3.dpo-*/config.json")
    assert json.loads(config.read_text())["config"]["policy"] == "loop.round1.dpo"
    rounds = json.loads((FOLDER / "loop.json").read_text())["rounds"]
    assert [done["refused"] for done in rounds] == ["", "rolled back: rude answers", ""]
    assert "round 4 is done" in night() and champion() == "loop.round4.dpo"


def test_a_move_that_was_cut_off_is_completed_before_the_next_round(
    night: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise ConnectionError("the Hub is away")

    with monkeypatch.context() as away:
        away.setattr(module, "_link", cut)
        assert "the Hub is away" in night()
    assert champion() == "" and "loop.round2.preferences" not in attempts()
    seen: list[str] = []
    begin = flows.loops.begin
    monkeypatch.setattr(flows.loops, "begin", lambda *given: seen.append(champion()) or begin(*given))
    assert "round 2 is done" in night() and seen == ["loop.round1.dpo"]
    assert champion() == "loop.round2.dpo"
