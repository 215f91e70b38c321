"""Metrics of a stage: its log, and their copy at Weights & Biases."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_core.config import SFT, Wandb
from rlhf_core.preflight.machine_checks import check_machine
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.plan import plan
from rlhf_core.runs.metrics_log import Tracker, read_metrics
from rlhf_core.runs.remote import wandb_mirror
from rlhf_core.runs.run_dir import RunDir
from tasks.keys import variables
from tests.support.stage_request import stage_request


@pytest.mark.parametrize("first", [0, 2])
def test_each_step_is_there_once(first: int, tmp_path: Path) -> None:
    for attempt, steps in enumerate([range(1, 5), range(first + 1, 4)]):
        tracker = Tracker(RunDir(tmp_path), 10, steps.start - 1)
        for step in steps:
            tracker.log(step, {"loss": 10.0 * attempt + step})
        tracker.close()
    expected = [(step, step + 10.0 * (step > first)) for step in range(1, 4)]
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == expected
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == expected


KEY = "0123456789abcdef0123456789abcdef01234567"
STAND_IN = """
import json, os
from pathlib import Path

SENT = Path(__file__).with_name("sent.jsonl")

def send(name, **what):
    if os.environ.get("STAND_IN_REFUSES") == name:
        raise PermissionError("no project for the key " + os.environ["WANDB_API_KEY"])
    with SENT.open("a") as file:
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
        send("log", step=step, metrics=metrics)
    def finish(self):
        send("finish", finished=True)

def init(settings, **given):
    send("init", init=given | {"settings": settings.given})
    known = [json.loads(line)["step"] for line in SENT.read_text().splitlines() if "step" in json.loads(line)]
    return Board(max(known, default=-1) + 1)
"""
Sent = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Puts the stand-in in the client's place; yields what it got so far."""
    monkeypatch.syspath_prepend(stand_in(tmp_path))
    sys.modules.pop("wandb", None)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")  # no probe of the server
    file = tmp_path / "client" / "sent.jsonl"
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    sys.modules.pop("wandb", None)


def stand_in(tmp_path: Path) -> Path:
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "wandb.py").write_text(STAND_IN)
    return tmp_path / "client"


def stage(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "sft-00ff")
    config = SFT.model_validate({"data": {"sources": "s3://ann:pw7@host/d.jsonl"}})
    shown = Wandb(project="chat", entity="team", group="recipe")
    run.prepare(stage_request(config, digest="00ff", seed=3, wandb=shown))
    return run


def trained(run: RunDir, steps: range) -> Tracker:
    tracker = Tracker(run, 10, first_step=steps.start)
    for step in steps:
        tracker.log(step + 1, {"loss": 1 / (step + 1), "eval/loss": float("nan")})
    return tracker


def test_every_line_arrives_in_one_run_also_of_a_stage_that_was_cut_off(sent: Sent, tmp_path: Path) -> None:
    run = stage(tmp_path)
    first = trained(run, range(0, 3))
    begun, *lines = sent()
    given = begun["init"]
    assert {name: given[name] for name in ("project", "entity", "group", "name", "job_type", "resume", "dir")} == {
        "project": "chat", "entity": "team", "group": "recipe", "name": "sft", "job_type": "sft", "resume": "allow", "dir": str(run.path),
    }  # fmt: skip
    assert "pw7" not in str(given) and "s3://***@host/d.jsonl" in str(given["config"])
    assert given["config"]["learning_rate"] == SFT.model_fields["learning_rate"].default
    assert given["config"]["seed"] == 3
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["metrics"]["loss"] == 0.5
    assert "time" not in lines[0]["metrics"]
    first.close()
    assert sent()[-1] == {"finished": True}
    trained(run, range(2, 5)).close()  # the last state was that of step 2
    again = [line for line in sent() if "init" in line]
    assert len(again) == 2 and again[1]["init"]["id"] == given["id"] and given["id"].startswith("00ff-")
    assert [line["step"] for line in sent() if "step" in line] == [1, 2, 3, 4, 5]
    assert KEY not in json.dumps(sent())
    assert not any(KEY in file.read_text() for file in (run / wandb_mirror.FOLDER).iterdir())


def test_steps_that_wandb_lacks_are_sent_after_a_resume(sent: Sent, tmp_path: Path) -> None:
    """The process was killed before its client had uploaded them."""
    run = stage(tmp_path)
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 0, "loss": 2.0}\n{"step": 2, "ti')
    trained(run, range(1, 2)).close()
    assert [(line["step"], line["metrics"]["loss"]) for line in sent() if "step" in line] == [
        (1, 2.0),
        (2, 0.5),
    ]


@pytest.mark.parametrize("refused", ["init", "log", "finish"])
def test_a_client_that_refuses_costs_a_line_without_the_key(
    sent: Sent,
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES", refused)
    trained(stage(tmp_path), range(0, 2)).close()
    out = capsys.readouterr().out
    assert (
        out.count(
            "W&B gets no more metrics: PermissionError: no project for the key ***; `wandb sync` sends"
            " those in "
        )
        == 1
        and KEY not in out
    )


def test_waits_for_the_client_are_bounded(sent: Sent, tmp_path: Path) -> None:
    trained(stage(tmp_path), range(0, 1)).close()
    settings = sent()[0]["init"]["settings"]
    assert settings["init_timeout"] <= 30
    assert 0 < settings["finish_timeout"] <= 10
    assert settings["finish_timeout_raises"]


def test_metrics_stay_on_the_disk_when_the_server_does_not_answer(
    sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    trained(stage(tmp_path), range(0, 1)).close()
    assert sent()[0]["init"]["mode"] == "offline" and sent()[-1] == {"finished": True}
    assert "W&B's server does not answer: `wandb sync` sends the metrics later" in capsys.readouterr().out


def test_the_client_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
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


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(recipe_of(recipe(wandb={"project": "chat"}, artifacts=str(tmp_path))))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "wandb").is_dir()])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "here" / "wandb").mkdir(parents=True)  # what the client leaves in a working directory
    monkeypatch.syspath_prepend(tmp_path / "here")
    (problem,) = check_machine(planned, ())
    assert problem.startswith("wandb: the package wandb is not installed")
    monkeypatch.syspath_prepend(stand_in(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert check_machine(planned, ()) == []
    monkeypatch.delenv("WANDB_API_KEY")
    (problem,) = check_machine(planned, ())
    assert problem.startswith("wandb: the environment variable WANDB_API_KEY is empty; set it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_machine(planned, ()) == []
