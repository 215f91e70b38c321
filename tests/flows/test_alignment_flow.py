"""Runs the flow with the real launcher and processes, in Prefect's test harness; its stages only write
files."""

from __future__ import annotations

import base64
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.blocks.system import Secret

import flows.alignment
import flows.cli.run_commands
import tasks.notify
from flows.alignment import alignment, stage
from rlhf_core.config import Recipe
from rlhf_core.preflight.inputs import require_here
from rlhf_core.recipe.load_recipe import load_recipe, recipe_of
from rlhf_core.recipe.named_inputs import beside
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.launch import StageFailed
from rlhf_core.runs.run_dir import RunDir
from rlhf_core.runs.run_records import records
from tasks.keys import provided
from tests.support.writing_stages import ORDER, artifacts, attempts, fault, statuses

pytestmark = pytest.mark.usefixtures("prefect")


def test_stages_run_in_order_and_a_second_run_skips_them(recipe: Callable[..., Recipe]) -> None:
    alignment(recipe())
    assert attempts() == ORDER
    assert set(statuses().values()) == {"done"} and list(statuses()) == ORDER
    assert load_recipe("artifacts/tiny/recipe.yaml") == recipe_of(
        beside(recipe(), Path.cwd(), absolute=True)[0]
    )
    before = json.loads(Path("artifacts/tiny/summary.json").read_text())
    page = Path("artifacts/tiny/report.html").read_text()
    assert "loop.round2" in page

    found = artifacts()
    assert "| loss | 1.5 |" in found["sft-metrics"]
    assert "file://" in found["sft-checkpoint"] and "made/checkpoint" in found["sft-checkpoint"]
    assert (
        "| loop.round2 | rule | 0.600 | 0.550 - 0.650 | played 300 battles |" in found["evaluation-win-rates"]
    )
    assert "report.html" in found["report"]
    picture = base64.b64decode(found["sft-curves"].removeprefix("data:image/svg+xml;base64,"))
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "evaluation-curves" not in found
    assert 'href="tiny/report.html"' in Path("artifacts/index.html").read_text()
    times = json.loads(Path("artifacts/tiny/run.json").read_text())
    assert 0 < times["ended"] - times["started"] < 600

    alignment(recipe())
    assert attempts() == ORDER
    assert set(statuses().values()) == {"skipped"}
    after = json.loads(Path("artifacts/tiny/summary.json").read_text())
    assert [entry["digest"] for entry in after["stages"]] == [entry["digest"] for entry in before["stages"]]


@pytest.mark.parametrize("command", [["run", "recipe.yaml"], ["stage", "sft", "recipe.yaml"]])
def test_the_command_line_plans_and_checks_a_recipe_once(
    command: list[str], recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe()
    calls: list[str] = []
    for module in (flows.alignment, flows.cli.run_commands):
        monkeypatch.setattr(module, "plan", lambda given: calls.append("plan") or plan(given))
        monkeypatch.setattr(module, "require_here", lambda planned, nodes: calls.append("require_here"))
    monkeypatch.setattr(tasks.notify, "recipe_of_run", lambda *_: calls.append("recipe_of_run"))
    assert flows.cli.main(command) == 0
    assert calls == ["plan", "require_here"]


def test_only_changed_stages_run_again(recipe: Callable[..., Recipe]) -> None:
    alignment(recipe())
    Path("attempts.txt").unlink()
    alignment("recipe.yaml", ("loop.beta=0.5",))
    assert attempts() == ORDER[3:]
    assert [name for name, status in statuses().items() if status == "skipped"] == ORDER[:3]


@pytest.mark.long
def test_gc_keeps_the_stages_of_every_run(recipe: Callable[..., Recipe]) -> None:
    """Runs with other seeds, and of one stage with an override, do not make stages of earlier runs
    garbage."""
    recipe()
    alignment("recipe.yaml", ("seed=1",))
    alignment("recipe.yaml", ("seed=2",))
    stage("recipe.yaml", "evaluation", ("seed=2", "evaluation.max_questions=5"))
    made = {path.parent for path in Path("artifacts/stages").glob("*/result.json")}
    assert len(made) == 2 * len(ORDER) + 1
    assert flows.cli.main(["gc", "artifacts", "--delete"]) == 0
    assert {path.parent for path in Path("artifacts/stages").glob("*/result.json")} == made

    runs = [json.loads(run.file.read_text()) for run in reversed(records(Path("artifacts")))]
    assert [run["overrides"] for run in runs] == [
        ["seed=1"],
        ["seed=2"],
        ["seed=2", "evaluation.max_questions=5"],
    ]
    assert {(run["source"], run["state"]) for run in runs} == {("recipe.yaml", "done")}
    names = {run["name"] for run in runs}  # after the recipe's file
    assert len(names) == 3 and all(re.fullmatch(r"recipe-[a-z]+-[a-z]+", name) for name in names), names
    assert [
        (run["config"]["seed"], run["config"]["stages"]["evaluation"]["max_questions"]) for run in runs
    ] == [
        (1, None),
        (2, None),
        (2, 5),
    ]
    assert all(0 < run["ended"] - run["started"] < 600 for run in runs)
    assert recipe_of(runs[0]["config"]).model_dump() == load_recipe("recipe.yaml", ("seed=1",)).model_dump()


def test_a_killed_stage_is_retried(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["killed"])
    alignment(recipe())
    assert attempts()[:3] == ["sft", "reward_model", "reward_model"]
    assert set(statuses().values()) == {"done"}


def test_a_stage_that_fails_twice_ends_the_run_with_a_report(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["killed", "killed"])
    with pytest.raises(StageFailed, match="reward_model"):
        alignment(recipe())
    assert attempts() == ["sft", "reward_model", "reward_model"]
    assert statuses() == {"sft": "done", "reward_model": "failed"} | dict.fromkeys(ORDER[2:], "not run")
    alignment(recipe())
    assert attempts()[3:] == ORDER[1:]


def test_wrong_input_is_not_retried(recipe: Callable[..., Recipe]) -> None:
    fault(reward_model=["refuses"])
    with pytest.raises(StageFailed, match="stage reward_model: the data has no rows: give some"):
        alignment(recipe())
    assert attempts() == ["sft", "reward_model"]


def test_checks_come_before_any_work(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.alignment, "require_here", require_here)
    with pytest.raises(ValueError, match=r"train\.jsonl: there is no such file"):
        alignment(recipe())
    assert attempts() == [] and not Path("artifacts").exists()


def test_only_the_named_stage_runs(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(
        ValueError,
        match=r"round1.preferences needs sft, reward_model, which are not done: run `alignflow stage sft",
    ):
        stage(recipe(), "loop")
    assert attempts() == []
    stage(recipe(), "sft")
    stage(recipe(), "reward_model")
    stage(recipe(), "loop.round1")
    assert attempts() == ORDER[:4]
    planned = plan(recipe())
    assert RunDir(planned["evaluation"].run_dir).result() is None
    assert statuses()["loop.round1.dpo"] == "done" and statuses()["evaluation"] == "not run"


@pytest.mark.long
def test_a_deleted_checkpoint_that_a_later_stage_needs(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    alignment(recipe())
    (plan(recipe())["reward_model"].run_dir / "made" / "checkpoint").unlink()
    before = attempts()
    assert flows.cli.main(["stage", "loop", "recipe.yaml", "loop.beta=0.7"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith(
        "stage loop.round1.preferences needs reward_model, which is not done: run `alignflow stage reward_model RECIPE`"
    )
    assert attempts() == before
    assert flows.cli.main(["run", "recipe.yaml"]) == 0
    assert attempts() == [*before, "reward_model"], "it alone is made anew"


def test_a_run_records_its_stages_at_its_start(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alignflow gc` reads that record while a run is in progress."""
    named = []

    def listed(request: Any, run_dir: Path, store: object) -> str:
        named.append(
            [entry["name"] for entry in json.loads(Path("artifacts/tiny/run.json").read_text())["stages"]]
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(flows.alignment, "run_stage", listed)
    with pytest.raises(KeyboardInterrupt):
        flows.alignment.run_all(plan(recipe()), plan(recipe()).nodes)
    assert named == [ORDER]


def test_a_key_of_a_prefect_secret_reaches_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Secret(value="hf_OnlyPrefectKnowsThis").save("hf-token")
    try:
        with provided(("HF_TOKEN", "A_KEY_NOBODY_KNOWS")):
            assert os.environ["HF_TOKEN"] == "hf_OnlyPrefectKnowsThis"
            assert "A_KEY_NOBODY_KNOWS" not in os.environ
        assert "HF_TOKEN" not in os.environ
    finally:
        Secret.delete("hf-token")


def test_the_command_and_its_exit_codes(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flows.cli.main(["run", "recipe.yaml", "--dry-run"]) == 0
    assert "7 to run, 0 to resume, 0 to skip" in capsys.readouterr().out
    fault(sft=["refuses"])
    assert flows.cli.main(["run", "recipe.yaml"]) == 2
    assert "stage sft: the data has no rows: give some" in capsys.readouterr().err
    fault(sft=["killed", "killed"])
    assert flows.cli.main(["run", "recipe.yaml"]) == 1
    assert flows.cli.main(["run", "recipe.yaml"]) == 0
    assert flows.cli.main(["run", "recipe.yaml", "--dry-run"]) == 0
    assert "0 to run, 0 to resume, 7 to skip" in capsys.readouterr().out
    assert flows.cli.main(["run", "recipe.yaml", "sft.max_len=700", "--dry-run"]) == 0
    assert "changed: max_len 512 -> 700" in capsys.readouterr().out
    Path("artifacts/tiny/report.html").unlink()
    assert flows.cli.main(["report", "artifacts/tiny"]) == 0 and Path("artifacts/tiny/report.html").exists()
    recorded = Path("artifacts/tiny/run.json").read_text()
    assert flows.cli.main(["report", "recipe.yaml"]) == 0
    edited = Path("recipe.yaml").read_text()
    Path("edited.yaml").write_text(edited + "seed: 11\n")
    assert flows.cli.main(["report", "edited.yaml"]) == 0
    # what the last run made is no more known as its own
    assert Path("artifacts/tiny/run.json").read_text() == recorded
    assert flows.cli.main(["stage", "sfft", "recipe.yaml"]) == 2
    assert flows.cli.main(["run", "none.yaml"]) == 2
    assert flows.cli.main(["no-such-command"]) == 2
    assert flows.cli.main(["validate", "recipe.yaml"]) == 0
    # all stages are done: nothing is needed
    assert flows.cli.main(["validate", "recipe.yaml", "--here"]) == 0
    capsys.readouterr()
    assert flows.cli.main(["validate", "recipe.yaml", "sft.max_len=700", "--here"]) == 2
    assert "stages.sft.data: train.jsonl: there is no such file" in capsys.readouterr().err
