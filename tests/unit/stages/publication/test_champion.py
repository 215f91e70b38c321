"""The champion of a recipe: one always, on the Hub and in the record, whatever request fails; and a failed
gate goes back by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flows.cli
from flows.cli.results.artifacts_history import survey
from rlhf_core.config import Publication, Recipe
from rlhf_core.config.gates import Verdict
from rlhf_core.recipe.plan import Plan, plan
from rlhf_core.runs.remote.store import Store
from rlhf_core.runs.run_dir import Outcome, RunDir
from rlhf_core.stages.publication import champion_record as module
from rlhf_core.stages.publication.champion_record import (
    BRANCH,
    FILE,
    LINK,
    champions_of,
    complete,
    promote,
    rollback,
)
from tasks.decisions import champion as task
from tests.support.hub_server import Blob, Hub, Repository
from tests.support.publishing import ONCE, THREE, serving_hub

REPO = "me/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(monkeypatch) as running:
        running.repositories[REPO] = Repository(private=True)
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "artifacts" / "night"


def publishing(folder: Path, number: int, hub: Hub | None = None, **config: Any) -> Plan:
    """A recipe that publishes round `number`."""
    stages: dict[str, Any] = {
        "loop": {
            "stage": "iterative_dpo",
            "reward": "org/r",
            "policy": "base",
            "prompts": {"sources": "p.jsonl"},
            "rounds": number,
        },
        "publication": {"model": "loop", "champion": True, "repo_id": REPO if hub else None, **config},
    }
    return plan(Recipe(name=folder.name, base_model="org/base", artifacts=str(folder.parent), stages=stages))


def published(folder: Path, number: int, hub: Hub | None = None, **config: Any) -> Path:
    """What a finished publication of round `number` leaves behind; with a Hub its commit is there."""
    planned = publishing(folder, number, hub, **config)
    node = planned["publication"]
    run = RunDir(node.run_dir)
    run.prepare(planned.request(node))
    (run / "published").mkdir(exist_ok=True)
    (run / "published" / "model.txt").write_text(str(number))
    outputs = {"published": "published"}
    if hub:
        commit = hub.repositories[REPO].commit(
            "main", f"round {number}", {"model.txt": Blob(str(number).encode(), False)}
        )
        (run / "hub.json").write_text(json.dumps({"repo_id": REPO, "commit": commit, "tag": "t", "url": "u"}))
        outputs["hub"] = "hub.json"
    run.finish(planned.request(node), Outcome({"files": 1.0}, outputs), 1.0)
    return run.path


def on_hub(hub: Hub) -> str | None:
    """The round whose model the branch `champion` holds."""
    repository = hub.repositories[REPO]
    commit = repository.branches.get(BRANCH)
    return repository.commits[commit].files["model.txt"].content.decode() if commit else None


def here(folder: Path) -> str:
    return (folder / LINK / "model.txt").read_text()


def test_a_promotion_moves_branch_link_and_record(folder: Path, hub: Hub) -> None:
    first = published(folder, 1, hub)
    second = published(folder, 2, hub)
    promote(folder, first, "best so far", "ann")
    assert (on_hub(hub), here(folder)) == ("1", "1")
    promote(folder, second, "better", "ann")
    assert (on_hub(hub), here(folder)) == ("2", "2")
    record = champions_of(folder)
    assert record.moving is None
    assert record.now is not None
    assert [reign.run for reign in record.reigns] == [first.name, second.name]
    assert record.now.commit == hub.repositories[REPO].branches["main"]


def test_a_rollback_goes_to_the_last_champion_that_was_not_rolled_back(folder: Path) -> None:
    runs = [published(folder, number) for number in (1, 2, 3)]
    with pytest.raises(ValueError, match="has no champion to roll back"):
        rollback(folder, "why")
    for run in runs:
        promote(folder, run, "better")
    rollback(folder, "rude")
    assert here(folder) == "2" and champions_of(folder).reigns[2].ended == "rude"
    rollback(folder, "slow")
    assert here(folder) == "1"
    with pytest.raises(ValueError, match="there is none to go back to"):
        rollback(folder, "wrong")
    assert here(folder) == "1"


@pytest.mark.parametrize("how", ["refuse", "cut", "lost", "busy", "expired", "full"])
@pytest.mark.parametrize("move", ["promote", "rollback"])
def test_there_is_one_champion_whatever_request_fails(folder: Path, hub: Hub, how: str, move: str) -> None:
    runs = [published(folder, number, hub) for number in (1, 2)]
    promote(folder, runs[0], "first", retries=ONCE)
    if move == "rollback":
        promote(folder, runs[1], "second", retries=ONCE)
    before, after = ("1", "2") if move == "promote" else ("2", "1")

    def moved() -> None:
        if move == "promote":
            promote(folder, runs[1], "second", retries=ONCE)
        else:
            rollback(folder, "bad", retries=ONCE)

    faults = 0
    for request in range(10):
        hub.break_at(request, how, times=1)
        try:
            moved()
        except (ConnectionError, ValueError):
            faults += 1
            assert on_hub(hub) in (before, after) and here(folder) in (before, after)
            now = champions_of(folder).now
            assert now is not None and now.run.startswith("publication-")
            hub.heal()
            complete(folder, retries=ONCE)  # the next command
        hub.heal()
        assert (on_hub(hub), here(folder), champions_of(folder).moving) == (after, after, None)
        done = champions_of(folder)
        assert len(done.reigns) == (2 if move == "promote" else 3), "nothing is counted twice"
        if faults <= request:
            break
        (folder / FILE).unlink()  # back to the beginning
        promote(folder, runs[0], "first", retries=ONCE)
        if move == "rollback":
            promote(folder, runs[1], "second", retries=ONCE)
    assert faults >= 2, "every request failed once"


@pytest.mark.parametrize("step", ["_move_branch", "_link", "write_text"])
def test_a_move_that_is_killed_is_completed(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = Store(str(folder.parent / "store"))
    runs = [published(folder, number, hub) for number in (1, 2)]
    promote(folder, runs[0], "first", store=store)

    def killed(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, step, killed)
        promote(folder, runs[1], "second", store=store)
    assert on_hub(hub) in ("1", "2") and here(folder) in ("1", "2")
    complete(folder, store)
    if step == "write_text":  # killed before anything was written down
        assert (on_hub(hub), here(folder)) == ("1", "1")
        promote(folder, runs[1], "second", store=store)
    assert (on_hub(hub), here(folder), champions_of(folder).moving) == ("2", "2", None)
    assert json.loads(store.files.read("champions/night.json") or b"")["reigns"][-1]["run"] == runs[1].name


def test_a_lost_answer_is_asked_again(folder: Path, hub: Hub) -> None:
    first = published(folder, 1, hub)
    hub.break_at(0, "lost")
    promote(folder, first, "first", retries=THREE)
    assert on_hub(hub) == "1"


def test_a_missing_token_is_told_before_anything_moves(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published(folder, 1, hub)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="HF_TOKEN is empty: set it"):
        promote(folder, first, "first")
    assert champions_of(folder) == module.Champions() and on_hub(hub) is None


def test_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [published(folder, number) for number in (1, 2)]
    stages = [{"name": "publication", "run_dir": f"stages/{run.name}"} for run in runs]
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"stages": stages}))
    other = published(folder.with_name("other"), 3)  # of another recipe, and newer
    assert flows.cli.main(["champion", str(folder)]) == 2 and "has no champion" in capsys.readouterr().err
    assert flows.cli.main(["promote", str(folder), runs[0].name, "--by", "ann"]) == 0
    # the newest
    assert flows.cli.main(["promote", str(folder), "publication", "--reason", "polite", "--by", "bob"]) == 0
    assert here(folder) == "2" and other.name not in champions_of(folder).model_dump_json()
    assert flows.cli.main(["rollback", str(folder), "--reason", "rude", "--by", "ann"]) == 0
    assert flows.cli.main(["promote", str(folder), "nothing"]) == 2
    told = capsys.readouterr()
    assert "the champion is loop" in told.out and "nothing is no finished publication of a model" in told.err
    assert flows.cli.main(["champion", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "polite (bob); rolled back: rude" in shown and f"in place of {runs[1].name}: rude (ann)" in shown


def failed(metric: str, stage: str = "evaluation") -> list[Verdict]:
    return [
        Verdict.model_validate(
            {"stage": stage, "gate": {"metric": metric, "min": 1.0}, "value": 0.0, "passed": False}
        )
    ]


class Logger:
    def info(self, *given: Any) -> None: ...

    warning = info


def test_a_gate_on_the_champion_goes_back_and_one_on_another_model_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "get_run_logger", Logger)
    monkeypatch.setattr(task, "notify_champion", lambda *given: None)

    def night(rounds: int) -> Any:
        stages: dict[str, Any] = {
            "loop": {
                "stage": "iterative_dpo",
                "reward": "org/r",
                "policy": "base",
                "prompts": {"sources": "p.jsonl"},
                "rounds": rounds,
            },
            "publication": {"model": "loop", "champion": True},
            "evaluation": {"models": ["loop"], "baseline": "base", "questions": {"path": "q.jsonl"}},
        }
        return plan(
            Recipe(name=folder.name, base_model="org/base", artifacts=str(folder.parent), stages=stages)
        )

    for number in (1, 2):
        published(folder, number)
        task.promote_published(night(number), night(number)["publication"])
        task.promote_published(night(number), night(number)["publication"])  # a night that finds it done
    assert here(folder) == "2" and len(champions_of(folder).reigns) == 2

    task.roll_back(night(2), failed("win_rate/loop.round1"))
    task.roll_back(night(2), failed("loss", "loop.round1.dpo"))
    task.roll_back(night(2), [])
    assert here(folder) == "2"
    task.roll_back(night(2), failed("win_rate/loop.round2"))
    assert here(folder) == "1" and "win_rate/loop.round2 is 0" in champions_of(folder).reigns[1].ended
    task.promote_published(night(2), night(2)["publication"])
    assert here(folder) == "1", "a model that was rolled back is not promoted by the next night"


def test_a_move_that_the_hub_refuses_for_good_gives_way_to_the_next(folder: Path, hub: Hub) -> None:
    runs = [published(folder, number, hub) for number in (1, 2, 3)]
    promote(folder, runs[0], "first", retries=ONCE)
    gone = hub.repositories[REPO].commits.pop(json.loads((runs[1] / "hub.json").read_text())["commit"])
    with pytest.raises(ValueError, match=r"has no|refused|does not see"):
        promote(folder, runs[1], "deleted on the Hub", retries=ONCE)
    assert gone and on_hub(hub) == here(folder) == "1"
    promote(folder, runs[2], "third", retries=ONCE)
    assert (on_hub(hub), here(folder)) == ("3", "3")
    assert [reign.run for reign in champions_of(folder).reigns] == [runs[0].name, runs[2].name]


def test_a_champion_that_came_meanwhile_stays_and_the_one_before_is_not_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [published(folder, number) for number in (1, 2, 3)]
    store = Store(str(folder.parent / "store"))
    promote(folder, runs[0], "first")
    promote(folder, runs[1], "second")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_link", killed)
        promote(folder, runs[2], "third")
    told: list[str] = []
    monkeypatch.setattr(task, "get_run_logger", Logger)
    monkeypatch.setattr(task, "notify_champion", lambda recipe, model, run, why: told.append(run))
    task.roll_back(publishing(folder, 2), failed("files", "publication"))
    assert rollback(folder, "again", store=store, expected=runs[1].name).run == runs[2].name
    assert told == [runs[2].name]
    first, second, third = (reign.ended for reign in champions_of(folder).reigns)
    assert here(folder) == "3" and not first and "files is 0" in second and not third
    assert module.Champions.model_validate_json(
        store.files.read("champions/night.json") or b""
    ) == champions_of(folder)
    rollback(folder, "slow")
    assert here(folder) == "1", "not the one with the failed gate"


def test_the_folder_of_the_last_model_is_no_place_for_champions() -> None:
    with pytest.raises(
        ValueError,
        match="folder holds only the last model, but a rollback needs earlier ones: leave out folder",
    ):
        Publication(model="loop", champion=True, folder="out")


def test_gc_keeps_the_champion_and_those_to_go_back_to(folder: Path) -> None:
    runs = [published(folder, number) for number in (1, 2, 3)]
    for run in runs[:2]:
        promote(folder, run, "better")
    used, garbage = survey(folder.parent)
    assert {item.path.name for item in used} == {run.name for run in runs[:2]}
    assert [item.path.name for item in garbage] == [runs[2].name]
