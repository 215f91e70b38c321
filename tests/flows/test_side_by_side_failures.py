"""Failures and gates of stages that run side by side: their siblings finish, nothing more starts, and the run
reports all errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import flows.cli
from flows.alignment import alignment
from flows.running import Ended, Threads
from rlhf_core.config import Recipe
from rlhf_core.recipe.gate_checks import GateFailed
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.runs.launch import SeveralFailed, StageFailed
from tests.support.writing_stages import attempts, fault, statuses

pytestmark = pytest.mark.usefixtures("prefect")
TEXT = """
name: tiny
base_model: org/model
side_by_side: 3
stages:
  a: {stage: dpo, policy: base, data: {sources: pairs.jsonl}}
  b: {stage: dpo, policy: base, beta: 0.2, data: {sources: pairs.jsonl}}
  after_a: {stage: dpo, policy: a, data: {sources: pairs.jsonl}}
  after_b: {stage: dpo, policy: b, data: {sources: pairs.jsonl}}
"""


@pytest.fixture
def branches(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    monkeypatch.setattr("flows.schedule.num_cpus", lambda: 4)
    Path("recipe.yaml").write_text(TEXT)
    return lambda *overrides: load_recipe("recipe.yaml", overrides)


def test_a_sibling_of_a_failed_stage_finishes_and_nothing_more_starts(
    branches: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(a=["refuses"], b=["waits"])
    ended = Threads.ended

    def then_go(threads: Threads) -> Ended:
        found = ended(threads)
        Path("go").touch()  # b ends after the flow knows that a has failed
        return found

    monkeypatch.setattr(Threads, "ended", then_go)
    with pytest.raises(StageFailed, match="stage a: the data has no rows"):
        alignment(branches())
    assert sorted(attempts())[:2] == ["a", "b"] and "after_a" not in attempts()
    found = statuses()
    assert (found["a"], found["b"], found["after_a"]) == ("failed", "done", "not run")
    alignment(branches())
    assert sorted(attempts()) == ["a", "a", "after_a", "after_b", "b"] and set(statuses().values()) <= {
        "done",
        "skipped",
    }


def test_all_failures_are_told(branches: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    branches()
    fault(a=["refuses"], b=["refuses", "refuses"])
    assert flows.cli.main(["run", "recipe.yaml"]) == 2
    told = capsys.readouterr().err
    assert "stage a: the data has no rows: give some" in told
    assert "stage b: the data has no rows: give some" in told
    assert "Traceback" not in told and sorted(attempts()) == ["a", "b"]
    assert statuses() == {"a": "failed", "b": "failed", "after_a": "not run", "after_b": "not run"}


def test_a_killed_stage_that_fails_again_is_retried_once(branches: Callable[..., Recipe]) -> None:
    fault(a=["killed", "killed"])
    with pytest.raises(StageFailed, match="stage a failed"):
        alignment(branches())
    assert attempts().count("a") == 2 and statuses()["b"] == "done" and statuses()["after_a"] == "not run"


def test_a_gate_that_stops_lets_siblings_finish(branches: Callable[..., Recipe]) -> None:
    gates = [f"{name}.gates=[{{metric: loss, max: 1.0}}]" for name in "ab"]
    with pytest.raises(GateFailed) as held:
        alignment(branches(*gates))
    assert [line.partition(":")[0] for line in str(held.value).splitlines()] == [
        "stage a",
        "stage b",
    ], "gates of siblings are checked too"
    assert sorted(attempts()) == ["a", "b"] and statuses()["after_b"] == "not run"
    fault(b=["refuses"])
    Path("attempts.txt").unlink()
    with pytest.raises(SeveralFailed) as both:
        alignment(branches(gates[0], "seed=1"))
    assert {type(error) for error in both.value.errors} == {StageFailed, GateFailed}
    assert sorted(attempts()) == ["a", "b"] and statuses()["b"] == "failed"


def test_a_gate_that_branches_lets_the_other_branch_go_on(branches: Callable[..., Recipe]) -> None:
    with pytest.raises(GateFailed, match=r"^stage a: loss is 1\.5"):
        alignment(branches("a.gates=[{metric: loss, max: 1.0, on_fail: branch}]"))
    assert sorted(attempts()) == ["a", "after_b", "b"] and statuses()["after_a"] == "not run"
    page = Path("artifacts/tiny/report.html").read_text()
    assert "which did not pass a gate" in page


def test_a_number_of_jobs_on_the_command_line(
    branches: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    branches()
    assert flows.cli.main(["run", "recipe.yaml", "--jobs", "1"]) == 0
    assert attempts() == ["a", "b", "after_a", "after_b"]
    run = json.loads(next(Path("artifacts/tiny/runs").glob("*.json")).read_text())
    assert run["config"]["side_by_side"] == 1
    assert flows.cli.main(["run", "recipe.yaml", "--jobs", "0"]) == 2
    assert "--jobs 0: give 1 or more stages" in capsys.readouterr().err
