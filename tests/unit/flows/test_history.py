"""Reads an artifacts folder: its stages, the differences of two runs, the lineage of a checkpoint, and
garbage."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

import flows.cli
from flows.cli.results.artifacts_history import (
    RunDifference,
    SurveyedItem,
    _win_rates,
    differences,
    lineage_of,
    remove,
    size_of,
    stages,
    survey,
)
from rlhf_core.config import DPO, SFT, Recipe
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.lineage import data_of
from rlhf_core.runs.run_dir import LOCK, REQUEST, RESULT, STATE, Outcome, RunDir
from rlhf_core.runs.run_records import NAME, RunRequest, asked, kept
from rlhf_core.system.files import is_locked
from tasks.run_report import record, this_run, views_of
from tests.support.chain import BASE, Chain, build
from tests.support.finished_run import finished, view


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return build(tmp_path / "artifacts")


def garbage(artifacts: Path) -> list[SurveyedItem]:
    return survey(artifacts)[1]


def refer(chain: Chain, recipe: str, *names: str) -> Path:
    """Writes a recipe's folder with these stages, as `tasks.run_report` does."""
    folder = chain.root / recipe
    folder.mkdir()
    stages = [
        {"name": name, "run_dir": f"stages/{chain.stages[name].name}", "status": "done"} for name in names
    ]
    (folder / "run.json").write_text(json.dumps({"recipe": recipe, "stages": stages}))
    (folder / "recipe.yaml").write_text(f"name: {recipe}\nbase_model: {BASE}\nseed: 7\nstages: {{}}\n")
    return folder


def another(chain: Chain, name: str, digest: str, metrics: dict[str, float], **changes: object) -> Path:
    """Makes another run of a stage with a changed configuration."""
    request = RunDir(chain.stages[name]).request()
    request = request.model_copy(
        update={"digest": digest, "config": request.config.model_copy(update=changes)}
    )
    run = RunDir(chain.root / "stages" / f"{name}-{digest}")
    run.prepare(request)
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "made-by.txt").write_text(digest)
    run.finish(request, Outcome(metrics, {"checkpoint": "checkpoint"}), 3.0)
    return run.path


def test_runs_of_a_folder(chain: Chain) -> None:
    (chain.stages["ppo"] / RESULT).unlink()
    (chain.root / "stages" / "something else").mkdir()
    found = {run.name: run for run in stages(chain.root)}
    assert set(found) == set(chain.stages)
    assert (found["sft"].kind, found["sft"].digest, found["sft"].state) == ("sft", f"{0:016x}", "done")
    assert (found["sft"].seconds, found["sft"].metric) == (1.5, "loss 0.1235")
    assert (found["ppo"].state, found["ppo"].seconds, found["ppo"].metric) == ("unfinished", None, "")
    with FileLock(chain.stages["ppo"] / LOCK):
        assert {run.name: run.state for run in stages(chain.root)}["ppo"] == "running"
    (chain.stages["dpo-1"] / "checkpoint" / "made-by.txt").write_text("cut")
    assert {run.name: run.state for run in stages(chain.root)}["dpo-1"] == "unfinished"
    with pytest.raises(ValueError, match="has no folder stages: give the `artifacts` folder"):
        stages(chain.root / "stages")


def test_differences_of_two_runs_of_a_stage(chain: Chain) -> None:
    other = another(chain, "sft", "f" * 16, {"loss": 0.5, "steps": 4.0}, learning_rate=2e-5)
    record = json.loads((other / REQUEST).read_text())
    (other / REQUEST).write_text(
        json.dumps(record | {"inputs": {"base": str(chain.stages["ppo"] / "checkpoint")}})
    )
    result = json.loads((other / RESULT).read_text())
    (other / RESULT).write_text(
        json.dumps(result | {"environment": result["environment"] | {"torch": "9.9"}})
    )
    found = differences(chain.stages["sft"], other / "checkpoint")
    assert RunDifference("sft", "digest", "", f"{0:016x}", "f" * 16) in found
    assert [change for change in found if change.part == "configuration"] == [
        RunDifference("sft", "configuration", "learning_rate", "1e-05", "2e-05")
    ]
    assert RunDifference("sft", "inputs", "base", BASE, f"ppo-{2:016x}") in found
    assert [(change.key, change.after) for change in found if change.part == "versions"] == [("torch", "9.9")]
    assert RunDifference("sft", "metrics", "loss", "0.123457", "0.5") in found
    assert RunDifference("sft", "metrics", "steps", "-", "4") in found
    assert differences(other, other) == []
    missing = chain.root / "nothing"
    file = chain.root / "file"
    file.touch()
    with pytest.raises(ValueError) as refused:
        differences(missing, file)
    assert [
        line.partition(": give two of <artifacts>/stages/<stage>-<digest>, or two of")[0]
        for line in str(refused.value).splitlines()
    ] == [
        f"{missing}: this folder does not exist",
        f"{file}: this is a file",
    ]
    with pytest.raises(ValueError, match=r"stages: this .* stage nor of a recipe that has run: give two of"):
        differences(other, chain.root / "stages")


def test_a_difference_of_digests_alone_names_data_or_code(chain: Chain) -> None:
    other = another(chain, "sft", "f" * 16, {"loss": 0.1234567891})
    (change,) = differences(chain.stages["sft"], other)
    assert change.part == "digest" and change.key == "its data, its base model or the stage's code"


def test_differences_of_two_recipes(chain: Chain) -> None:
    before = refer(chain, "one", "sft", "ppo")
    after = refer(chain, "two", "sft", "reward_model")
    found = differences(before, after)
    assert RunDifference("", "recipe", "name", "one", "two") in found
    assert RunDifference("ppo", "stages", "", "there", "not there") in found
    assert RunDifference("reward_model", "stages", "", "not there", "there") in found
    assert not [change for change in found if change.stage == "sft"]


def test_a_lineage_with_its_data(chain: Chain) -> None:
    (chain.root / "data" / "pairs.jsonl").write_text("{}\n")
    told = data_of(lineage_of(str(chain.checkpoint)))
    places = {(stage, field, name): digest for stage, field, name, digest in told}
    assert places["sft", "data", "sloppy.jsonl"] == ""
    assert len(places["reward_model", "data", "pairs.jsonl"]) == 16
    with pytest.raises(ValueError, match="this file or folder does not exist"):
        lineage_of(str(chain.root / "nowhere" / "at-all"))


def test_stages_without_a_run_are_garbage(chain: Chain) -> None:
    assert {item.path for item in garbage(chain.root)} == set(chain.stages.values())
    refer(chain, "one", "dpo-1")
    (item,) = garbage(chain.root)  # dpo-1 needs all others but the evaluation
    assert item.path == chain.stages["evaluation"] and item.size == size_of(chain.stages["evaluation"]) > 0
    assert remove(item) and not item.path.exists() and garbage(chain.root) == []


def test_resume_states_of_done_stages(chain: Chain) -> None:
    refer(chain, "one", *chain.stages)
    for name in ("sft", "ppo"):
        (chain.stages[name] / STATE / "step-1").mkdir(parents=True)
        (chain.stages[name] / STATE / "step-1" / "weights").write_bytes(b"x" * 1000)
    (chain.stages["ppo"] / RESULT).unlink()  # it can resume from its state
    (item,) = garbage(chain.root)
    assert (item.path, item.size) == (chain.stages["sft"] / STATE, 1000)
    assert remove(item) and RunDir(chain.stages["sft"]).result() is not None and not item.path.exists()


def test_locked_stages_and_their_ancestors_are_kept(chain: Chain) -> None:
    with FileLock(chain.stages["ppo"] / LOCK):
        assert is_locked(chain.stages["ppo"] / LOCK)
        found = garbage(chain.root)
        assert {item.path for item in found} == {
            chain.stages[name] for name in ("pairs-1", "dpo-1", "evaluation")
        }
    assert not is_locked(chain.stages["ppo"] / LOCK) and not is_locked(chain.stages["sft"] / LOCK)
    item = next(item for item in garbage(chain.root) if item.path == chain.stages["ppo"])
    with FileLock(chain.stages["ppo"] / LOCK):
        assert not remove(item) and RunDir(item.path).result() is not None
    refer(chain, "one", "ppo")  # a run that started meanwhile
    assert not remove(item) and item.path.exists()


def test_an_unreadable_record_stops_gc(chain: Chain) -> None:
    refer(chain, "one", "sft")
    (chain.root / "one" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json cannot be read: run the recipe again"):
        garbage(chain.root)


def test_records_of_earlier_runs(chain: Chain) -> None:
    folder = refer(chain, "one", "sft")
    (folder / "runs").mkdir()
    stages = [
        {"name": name, "run_dir": f"stages/{chain.stages[name].name}"} for name in ("ppo", "evaluation")
    ]
    (folder / "runs" / "20260101-000000-000000-0a0a0a0a.json").write_text(json.dumps({"stages": stages}))
    assert {item.path for item in garbage(chain.root)} == set()  # the evaluation needs all others
    (folder / "runs" / "20260101-000000-000000-0a0a0a0a.json").write_text("{")
    with pytest.raises(ValueError, match=r"0a0a0a0a\.json cannot be .* it, or remove it if nothing needs it"):
        garbage(chain.root)


def test_each_run_has_its_own_record(tmp_path: Path) -> None:
    data = {"sources": "train.jsonl"}
    recipe = Recipe(
        name="one",
        base_model="org/model",
        artifacts=str(tmp_path / "artifacts"),
        stages={"sft": {"data": data}},
    )
    names = []
    for seed in range(3):
        planned = plan(recipe.model_copy(update={"seed": seed}))
        run = RunDir(planned["sft"].run_dir)
        run.prepare(planned.request(planned["sft"]))
        names.append(run.path)
        this = this_run("one")
        record(planned, views_of(planned, {"sft": "failed"}), this)
        record(planned, views_of(planned, {"sft": "failed"}), this, "failed", ended=2e9)
    assert len(set(names)) == 3
    assert all(path.is_dir() for path in names)
    assert garbage(tmp_path / "artifacts") == []
    kept = sorted((tmp_path / "artifacts" / "one" / "runs").iterdir())
    assert len(kept) == 3 and json.loads(kept[1].read_text())["ended"] == 2e9


def test_the_commands(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    refer(chain, "one", "dpo-1")
    for arguments, told in (
        (["stages", str(chain.root)], "6 stages, 6 done"),
        (["lineage", str(chain.checkpoint)], "dpo-1 (dpo)"),
        (
            ["lineage", "stages/dpo-9"],
            "The folder stages/dpo-9 does not exist. For a model on the Hub, nothing here records",
        ),
        (["diff", str(chain.stages["sft"]), str(chain.stages["sft"])], "no difference"),
        (["diff", str(chain.stages["sft"]), str(chain.stages["ppo"])], "configuration"),
        (["gc", str(chain.root)], "1 folders, "),
    ):
        assert flows.cli.main(arguments) == 0
        assert told in capsys.readouterr().out
    assert chain.stages["evaluation"].exists()
    assert flows.cli.main(["gc", str(chain.root), "--delete"]) == 0
    assert "removed" in capsys.readouterr().out and not chain.stages["evaluation"].exists()
    shutil.rmtree(chain.root)
    assert flows.cli.main(["runs", str(chain.root)]) == 2
    assert "has no folder stages" in capsys.readouterr().err


def test_a_store_is_named_and_not_read(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    (chain.root / "one").mkdir(exist_ok=True)
    (chain.root / "one" / "recipe.yaml").write_text("{name: one, store: 's3://bucket/team', stages: {}}")
    for command in ("stages", "gc"):
        assert flows.cli.main([command, str(chain.root)]) == 0
        assert "s3://bucket/team: this store was not read" in capsys.readouterr().out


def test_old_records_are_shown(chain: Chain) -> None:
    """A run whose configuration has an unknown key is shown."""
    for name, kind in (("sft", SFT), ("dpo-1", DPO)):
        record = json.loads((chain.stages[name] / REQUEST).read_text())
        assert record["config"]["stage"] == kind.model_fields["stage"].default
        record["config"]["a_key_of_old"] = 1
        (chain.stages[name] / REQUEST).write_text(json.dumps(record))
    assert {run.state for run in stages(chain.root)} == {"done"}
    assert RunDifference("sft", "configuration", "a_key_of_old", "1", "-") in differences(
        chain.stages["sft"], chain.stages["ppo"]
    )


def recorded(chain: Chain, identity: str, name: str, started: float, seed: int, *stages: str) -> Path:
    """Writes the record of a run of the recipe `demo`, with a page."""
    file = chain.root / "demo" / "runs" / f"{identity}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    there = [
        dict(name=stage.partition("-")[0], kind="sft", parents=[], run_dir=f"stages/{stage}", status="done")
        for stage in stages
    ]
    record = {"recipe": "demo", "name": name, "started": started, "state": "done", "stages": there}
    file.write_text(json.dumps(record | {"config": {"seed": seed, "stages": {}}}))
    file.with_suffix(".html").write_text(f"page of {name}")
    return file


def test_commands_take_runs_by_name(
    chain: Chain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = another(chain, "sft", "f" * 16, {"loss": 0.5}, learning_rate=2e-5)
    recorded(chain, "20260101-000000-aaaaaa", "one", 1e9, 1, chain.stages["sft"].name)
    newest = recorded(chain, "20260202-000000-bbbbbb", "two", 2e9, 2, other.name)
    monkeypatch.chdir(chain.root.parent)
    for pair in (("one", "two"), ("20260101", "20260202-000000-bbbbbb")):
        assert flows.cli.main(["diff", *pair]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "recipe seed 1 2" in told
        assert "learning_rate 1e-05 2e-05" in told
        assert "metrics loss 0.123457 0.5" in told
    assert flows.cli.main(["lineage", "two"]) == 0
    assert "sft (sft)" in capsys.readouterr().out
    (chain.root / "demo" / "run.json").write_text(newest.read_text())
    assert flows.cli.main(["report", "one"]) == 0
    page = chain.root / "demo" / "runs" / "20260101-000000-aaaaaa.html"
    assert str(page.relative_to(chain.root.parent)) in capsys.readouterr().out.replace("\n", "")
    assert "<html" in page.read_text()
    assert newest.with_suffix(".html").read_text() == "page of two"
    assert flows.cli.main(["champion", "two"]) == 2
    assert "demo has no champion" in capsys.readouterr().err
    assert flows.cli.main(["diff", "one", "tow"]) == 2
    assert "the nearest: two (20260202-000000-bbbbbb)" in " ".join(capsys.readouterr().err.split())


def test_pages_of_runs_that_are_not_kept_are_garbage(chain: Chain) -> None:
    old = recorded(chain, "20260101-000000-aaaaaa", "one", 1e9, 1, chain.stages["sft"].name)
    new = recorded(chain, "20260202-000000-bbbbbb", "two", 2e9, 2, chain.stages["sft"].name)
    keeping = partial(kept, keep_runs=1)
    pages = [item for item in survey(chain.root, keeping)[1] if item.path.suffix == ".html"]
    assert [item.path for item in pages] == [old.with_suffix(".html")]
    assert not remove(pages[0]) and remove(pages[0], keeping)
    assert not pages[0].path.exists() and new.with_suffix(".html").exists() and old.exists()


def test_a_run_of_prefect_is_named_after_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import alignment

    monkeypatch.setattr(
        alignment.runtime.flow_run, "parameters", {"recipe": {"name": "tiny-cpu"}}, raising=False
    )
    names = {alignment.run_name() for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("tiny-cpu-") and NAME.fullmatch(name) for name in names)
    token = asked.set(RunRequest(name="mine"))
    try:
        assert alignment.run_name() == "mine"
    finally:
        asked.reset(token)


def test_win_rates_differ_with_their_intervals(tmp_path: Path) -> None:
    folders = []
    for side, shift in (("one", 0.0), ("two", 0.1)):
        finished(tmp_path / side)
        run_dir = view(tmp_path / side, "evaluation").run_dir
        result = RunDir(run_dir).result()
        assert result is not None
        file = run_dir / result.outputs["report"] / "eval.json"
        report = json.loads(file.read_text())
        for rate in report["win_rates"]:
            rate.update(win_rate=0.5 + shift, ci_low=0.4 + shift, ci_high=0.6 + shift)
        size = file.stat().st_size  # a result counts while its files have the sizes that it names
        file.write_text(json.dumps(report, separators=(",", ":")).ljust(size))
        folders.append(run_dir)
    found = list(_win_rates("evaluation", *folders))
    assert found and {(change.before, change.after) for change in found} == {
        ("50.0% (40.0% to 60.0%)", "60.0% (50.0% to 70.0%)")
    }


def test_empty_lists_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stages").mkdir()
    assert flows.cli.main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "this folder has no runs yet: start one with `alignflow run RECIPE`\n"
    assert flows.cli.main(["stages", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "this folder has no stages yet: run some with `alignflow run RECIPE`\n"
    assert flows.cli.main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
