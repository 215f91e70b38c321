"""What the lines of a run say, from files as a run writes them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from flows.cli.terminal.frame import StageLine
from flows.cli.terminal.watch import RunWatch
from rlhf_core.runs.run_dir import LOCK, LOG, METRICS, RunDir, StageRequest

NAMES = ("sft", "dpo", "kto", "loop.round1.dpo")
LOSS = {"metric": "loss", "max": 0.1}


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    folder = tmp_path / "stages"
    nodes = [
        SimpleNamespace(name=name, run_dir=folder / f"{name}-0", done=False, parents=()) for name in NAMES
    ]
    return SimpleNamespace(
        artifacts=tmp_path, folder=tmp_path / "mine", recipe=SimpleNamespace(name="mine"), nodes=nodes
    )


def record(planned: Any, parents: dict[str, list[str]]) -> None:
    stages = [
        dict(name=n, kind="dpo", run_dir=f"stages/{n}-0", status="not run", parents=parents.get(n, []))
        for n in NAMES
    ]
    told = dict(
        recipe="mine", host="", pid=os.getpid(), started=time.time() - 60, ended=None, state="", stages=stages
    )
    (planned.folder / "runs").mkdir(parents=True)
    (planned.folder / "runs" / "id.json").write_text(json.dumps(told))


def begin(planned: Any, name: str, log: str, **config: Any) -> Path:
    given = {"stage": "dpo", "policy": "base", "data": {"sources": "x.jsonl"}} | config
    run = RunDir(planned.artifacts / "stages" / f"{name}-0")
    run.prepare(
        StageRequest.model_validate({"name": name, "digest": "0", "config": given, "inputs": {}, "seed": 0})
    )
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - 30))
    (run / LOG).write_text(f"--- {started} {name}\n{log}")
    return run.path


def lines(watch: RunWatch) -> dict[str, StageLine]:
    return {line.name: line for line in watch.moment("").lines}


def test_before_the_run_has_a_record(planned: Any) -> None:
    planned.nodes[0].done = True
    planned.nodes[2].parents = ("sft", "dpo")
    moment = RunWatch(planned, planned.nodes, "id").moment("importing Prefect")
    assert moment.title == "mine" and moment.doing == "importing Prefect"
    assert [line.state for line in moment.lines] == ["skipped", "waiting", "waiting", "waiting"]
    assert [line.text for line in moment.lines] == ["", "", "waits for dpo", ""]


def test_what_each_stage_does(planned: Any) -> None:
    record(planned, {"dpo": ["sft"], "kto": ["sft"], "loop.round1.dpo": ["dpo"]})
    watch = RunWatch(planned, planned.nodes, "id")
    sft = begin(
        planned,
        "sft",
        "importing the libraries of SFT\nLoading safetensors checkpoint shards: 0% Completed | 0/1 [00:00<?,"
        " ?it/s]\n",
    )
    with FileLock(sft / LOCK):
        told = lines(watch)
        assert told["sft"].state == "running"
        assert told["sft"].text == "importing the libraries of SFT"
        assert told["sft"].steps is None
        assert told["sft"].seconds is not None and 29 <= told["sft"].seconds < 59
        assert (told["dpo"].state, told["dpo"].text) == ("waiting", "waits for sft")
        now = time.time()
        (sft / METRICS).write_text(
            "".join(
                json.dumps({"step": step, "time": now + 2 * step, "loss": 1.5}) + "\n"
                for step in (1, 2, 3, 4)
            )
        )
        with (sft / LOG).open("a") as log:
            log.write("step 3/10  loss 1.5  grad_norm 1\n")
        told = lines(watch)
        assert told["sft"].steps == (4, 10) and told["sft"].text == "loss 1.5  grad_norm 1"
        # as the pages have it: from the last step that the log names
        assert told["sft"].left == pytest.approx(14)


def test_stages_that_a_gate_keeps_from_starting(planned: Any) -> None:
    record(planned, {"dpo": ["sft"], "kto": ["sft"]})
    run_dir = begin(planned, "sft", "", gates=[LOSS])
    result = dict(
        name="sft", stage="dpo", digest="0", seconds=3.0, metrics={"loss": 0.5}, outputs={}, files={}
    )
    (run_dir / "result.json").write_text(json.dumps(result | {"environment": {}}))
    told = lines(RunWatch(planned, planned.nodes, "id"))
    assert told["sft"].state == "done" and told["sft"].seconds == 3.0
    assert told["dpo"].state == "waiting"
    assert told["dpo"].text == "sft does not pass a gate: loss is 0.5, at most 0.1 (stop)"


def test_time_left_of_a_stage_without_metrics(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record(planned, {})
    run_dir = begin(planned, "sft", "sampled answers to 10 of 100 prompts, 99 tokens\n")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with FileLock(run_dir / LOCK):
        watch = RunWatch(planned, planned.nodes, "id")
        assert lines(watch)["sft"].left is None
        with (run_dir / LOG).open("a") as log:
            log.write("sampled answers to 20 of 100 prompts, 199 tokens\n")
        monkeypatch.setattr(time, "monotonic", lambda: now + 5)
        assert lines(watch)["sft"].left == pytest.approx(40, rel=0.1)
