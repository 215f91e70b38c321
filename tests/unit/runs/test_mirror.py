"""Metrics in Weights & Biases: a stand-in for its client writes down what it is told; the client itself, offline, where it is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import SFT, Wandb
from rlhf_core.preflight.inputs import check_machine
from rlhf_core.recipe.load import recipe_of
from rlhf_core.recipe.plan import plan
from rlhf_core.runs import wandb_mirror
from rlhf_core.runs.metrics_log import Tracker
from rlhf_core.runs.run_dir import RunDir, StageRequest
from tasks.keys import variables

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef0123456789abcdef01234567"
STAND_IN = """
import json, os, time
from pathlib import Path

TOLD = Path(__file__).with_name("told.jsonl")

def tell(**what):
    with TOLD.open("a") as file:
        file.write(json.dumps(what) + "\\n")

class Settings:
    def __init__(self, **given):
        self.given = given

class Board:
    def __init__(self, step):
        self.step = step
    def log(self, metrics, step):
        assert step >= self.step
        self.step = step
        tell(step=step, metrics=metrics)
    def finish(self, exit_code):
        tell(finished=exit_code)

def init(settings, **given):
    tell(init=given | {"settings": settings.given})
    how = os.environ.get("STAND_IN")
    if how == "refuses":
        raise PermissionError("no project for the key " + os.environ["WANDB_API_KEY"])
    if how == "hangs":
        time.sleep(60)
    known = [json.loads(line)["step"] for line in TOLD.read_text().splitlines() if "step" in json.loads(line)]
    return Board(max(known, default=-1) + 1)
"""
Told = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the client was told so far."""
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'client'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")  # nobody is asked whether a server is there
    file = tmp_path / "client" / "told.jsonl"
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def stage(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "sft-00ff")
    config = SFT.model_validate({"data": {"sources": "s3://ann:pw7@host/d.jsonl"}})
    shown = Wandb(project="chat", entity="team", group="recipe")
    run.prepare(StageRequest(name="sft", digest="00ff", config=config, inputs={}, seed=3, wandb=shown))
    return run


def trained(run: RunDir, steps: range) -> Tracker:
    tracker = Tracker(run, 10, first_step=steps.start)
    for step in steps:
        tracker.log(step + 1, {"loss": 1 / (step + 1), "eval/loss": float("nan")})
    return tracker


def wait_for(true: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_line_arrives_in_one_run_also_of_a_stage_that_was_cut_off(told: Told, tmp_path: Path) -> None:
    run = stage(tmp_path)
    trained(run, range(0, 3)).close()
    begun, *lines, end = told()
    given = begun["init"]
    assert {name: given[name] for name in ("project", "entity", "group", "name", "job_type", "resume", "dir")} == {
        "project": "chat", "entity": "team", "group": "recipe", "name": "sft", "job_type": "sft", "resume": "allow", "dir": str(run.path),
    }  # fmt: skip
    assert "pw7" not in str(given) and "s3://***@host/d.jsonl" in str(given["config"])
    assert given["config"]["learning_rate"] == SFT.model_fields["learning_rate"].default and given["config"]["seed"] == 3
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[1]["metrics"]["loss"] == 0.5 and "time" not in lines[0]["metrics"]
    assert end == {"finished": 0}
    trained(run, range(2, 5)).close()  # the last state was that of step 2
    again = [line for line in told() if "init" in line]
    assert len(again) == 2 and again[1]["init"]["id"] == given["id"] and given["id"].startswith("00ff-")
    assert [line["step"] for line in told() if "step" in line] == [1, 2, 3, 4, 5]
    assert KEY not in json.dumps(told()) and not any(KEY in file.read_text() for file in (run / wandb_mirror.FOLDER).iterdir())


def test_lines_are_sent_while_the_stage_works(told: Told, tmp_path: Path) -> None:
    tracker = trained(stage(tmp_path), range(0, 2))
    wait_for(lambda: [line["step"] for line in told() if "step" in line] == [1, 2])
    assert {"finished": 0} not in told()
    tracker.close()
    assert told()[-1] == {"finished": 0}


def test_a_stage_that_dies_leaves_a_run_that_failed(told: Told, tmp_path: Path) -> None:
    run = stage(tmp_path)
    code = "import os, sys; from rlhf_core.runs import run_dir, wandb_mirror as m; m.mirror_of(run_dir.RunDir(sys.argv[1])); os._exit(9)"
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 0, "loss": 2.0}\n{"step": 2, "ti')
    assert subprocess.run([sys.executable, "-c", code, str(run.path)], timeout=30).returncode == 9
    wait_for(lambda: {"finished": 1} in told())
    assert [line["step"] for line in told() if "step" in line] == [1]


def test_a_client_that_refuses_costs_a_line_without_the_key(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", "refuses")
    trained(stage(tmp_path), range(0, 1)).close()
    out = capfd.readouterr().out
    assert "W&B gets no metrics of sft: PermissionError: no project for the key ***" in out and KEY not in out


def test_a_client_that_hangs_is_left_behind(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", "hangs")
    monkeypatch.setattr(wandb_mirror, "CLOSE_SECONDS", 1.0)
    tracker = trained(stage(tmp_path), range(0, 1))
    wait_for(told)
    start = time.monotonic()
    tracker.close()
    assert 0.9 < time.monotonic() - start < 5
    assert tracker._mirror is not None and tracker._mirror._process.returncode == -signal.SIGKILL
    assert "W&B has not taken all metrics after 1 s: `wandb sync` sends those in" in capfd.readouterr().out


def test_a_server_that_does_not_answer_is_left_alone(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    trained(stage(tmp_path), range(0, 1)).close()
    assert told()[0]["init"]["mode"] == "offline" and told()[-1] == {"finished": 0}
    assert "W&B's server does not answer: `wandb sync` sends the metrics later" in capfd.readouterr().out


def test_the_client_itself_offline(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("wandb")
    monkeypatch.setenv("PYTHONPATH", f"{Path(real.__file__).parents[1]}{os.pathsep}{ROOT}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_mirror, "CLOSE_SECONDS", 60.0)
    run = stage(tmp_path)
    trained(run, range(0, 3)).close()
    (file,) = (run / wandb_mirror.FOLDER).glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"eval/loss" in content and (run / wandb_mirror.FOLDER / "id").read_bytes() in content
    everything = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in everything if KEY.encode() in path.read_bytes()]


def recipe(**more: Any) -> dict[str, Any]:
    return {"name": "x", "base_model": "org/b", "stages": {"sft": {"data": {"sources": "t.jsonl"}}}, **more}


def test_a_recipe_says_where_its_stages_are_shown_and_that_is_in_no_digest() -> None:
    planned = plan(recipe_of(recipe(wandb={"project": "chat"})))
    assert planned.request(planned["sft"]).wandb == Wandb(project="chat", group="x")
    without = plan(recipe_of(recipe()))
    assert without["sft"].digest == planned["sft"].digest and without.request(without["sft"]).wandb is None
    assert "WANDB_API_KEY" in variables(planned.recipe) and "WANDB_API_KEY" not in variables(without.recipe)
    for wrong in ({}, {"project": "a/b"}, {"project": "a", "key": KEY}):
        with pytest.raises(ValueError, match=r"^wandb\.(project|key): "):
            recipe_of(recipe(wandb=wrong))


def test_what_is_missing_is_one_sentence(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(recipe_of(recipe(wandb={"project": "chat"}, artifacts=str(tmp_path))))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "wandb").is_dir()])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "here" / "wandb").mkdir(parents=True)  # what the client leaves in a working directory
    monkeypatch.syspath_prepend(tmp_path / "here")
    (problem,) = check_machine(planned, ())
    assert problem.startswith("wandb: the package wandb is not installed")
    monkeypatch.syspath_prepend(tmp_path / "client")
    assert check_machine(planned, ()) == []
    monkeypatch.delenv("WANDB_API_KEY")
    (problem,) = check_machine(planned, ())
    assert problem.startswith("wandb: the environment variable WANDB_API_KEY is empty; set it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_machine(planned, ()) == []
