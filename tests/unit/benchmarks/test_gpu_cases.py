"""Runs for several GPUs: each is a valid stage with a finite forecast, the stored record has it, and a machine
that cannot make a run refuses it."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cluster.layout import arrange
from rlhf_core.config import PPO, Trainable
from tests.benchmarks import record

several_gpus = importlib.import_module("several_gpus")
forecasts = importlib.import_module("several_gpus_forecast")
CASES = several_gpus.CASES
PAIRS = [(case, kind) for case in CASES for kind in several_gpus.KINDS]
NAMES = [f"{case.name}-{kind}" for case, kind in PAIRS]


def gpus_of(stage: PPO | Trainable) -> float:
    if isinstance(stage, PPO):
        return sum(bundle.get("GPU", 0.0) for bundle in arrange(stage.placed, stage.together).bundles)
    return stage.ranks.world_size * stage.ranks.gpus


@pytest.mark.parametrize(("case", "kind"), PAIRS, ids=NAMES)
def test_each_case_is_a_stage_with_a_finite_forecast(case: Any, kind: str, tmp_path: Path) -> None:
    stage = forecasts.stage_of_case(case, forecasts.parsed(case, kind, tmp_path))
    assert stage.dtype == "bfloat16"
    assert gpus_of(stage) == (6 if "--placement split-6" in case.arguments else case.gpus)
    figures = forecasts.figures_of_plan(case, kind)
    assert all(math.isfinite(figure["value"]) and figure["value"] >= 0 for figure in figures.values())
    assert {figure["unit"] for figure in figures.values()} <= {"s", "GiB", "tokens/s"}
    assert forecasts.peak_of(figures) > 10 and figures[forecasts.HOST]["value"] > 0
    if case.script == "ppo_step":
        phases = sum(f["value"] for name, f in figures.items() if f["unit"] == "s" and name != "step")
        assert figures["step"]["value"] == pytest.approx(phases, abs=0.05)
    if kind == "h200":
        assert forecasts.fits(figures, kind)


def test_the_stored_forecast_has_every_case_and_names_those_that_do_not_fit() -> None:
    stored = record.load(several_gpus.FORECAST)
    assert len({case.name for case in CASES}) == len(CASES)
    expected = {
        f"{case.name}, {kind}, {name}"
        for case, kind in PAIRS
        for name in forecasts.figures_of_plan(case, kind)
    }
    assert stored["figures"].keys() == expected, "write it anew: several_gpus.py --forecast"
    for case, kind in PAIRS:
        told = f"{case.name} on {kind} (" in stored["note"]
        assert told != forecasts.fits(several_gpus.stored_forecast(case, kind), kind)


def test_the_list_has_a_command_of_each_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["several_gpus.py", "--list"])
    assert several_gpus.main() == 0
    printed = capsys.readouterr().out
    for case in CASES:
        (line,) = (line for line in printed.splitlines() if f"--run {case.name} " in line)
        words = shlex.split(line)[2:]
        assert several_gpus.command_line().parse_args(words).run == case.name
        assert ("--model" in words) == bool(case.shape)


def test_a_machine_without_gpus_refuses_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_gpus, "num_gpus", lambda: 0)
    monkeypatch.setattr(several_gpus, "run_child", lambda *_: pytest.fail("it started"))
    command = [
        "several_gpus.py",
        "--run",
        "ppo-7.6b-4",
        "--model",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as told:
        several_gpus.main()
    assert told.value.code == "ppo-7.6b-4 needs 4 GPUs and this machine has 0: run it on one with 4"
    assert not (tmp_path / "out").exists()


def test_a_machine_with_too_few_gpus_or_too_little_host_memory_refuses() -> None:
    case = several_gpus.BY_NAME["dpo-72b-8-host-adam"]
    forecast = {forecasts.HOST: record.figure(1000.0, "GiB")}
    gib = 2**30
    assert several_gpus.refusal(case, 8, 1000.0 * gib, forecast) is None
    assert several_gpus.refusal(case, 9, 2000.0 * gib, forecast) is None
    assert "needs 8 GPUs and this machine has 7" in several_gpus.refusal(case, 7, 2000.0 * gib, forecast)
    assert "1,000 GiB of host memory and 560 are free" in several_gpus.refusal(case, 8, 560.0 * gib, forecast)


@pytest.mark.parametrize(
    ("names", "kind"), [("8 x NVIDIA H200", "h200"), ("4 x NVIDIA H100 80GB HBM3", "h100")]
)
def test_the_kind_of_gpu_is_that_of_its_name(names: str, kind: str) -> None:
    assert several_gpus.kind_of(names) == kind


@pytest.mark.parametrize("names", ["8 x NVIDIA B200", "x86_64, no GPU", "1 x NVIDIA H100, 1 x NVIDIA H200"])
def test_other_gpus_have_no_forecast(names: str) -> None:
    with pytest.raises(ValueError, match="the forecasts are for h100 and h200, but this machine has"):
        several_gpus.kind_of(names)


def test_a_case_without_a_stored_forecast_says_how_to_write_it() -> None:
    with pytest.raises(ValueError, match="has no forecast of new on h200: write it with --forecast"):
        several_gpus.stored_forecast(CASES[0]._replace(name="new"), "h200")


def test_a_run_records_what_was_measured_beside_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = several_gpus.BY_NAME["ppo-7.6b-4"]
    planned = several_gpus.stored_forecast(case, "h200")["step"]["value"]
    started = list[tuple[str, ...]]()

    def measure(*words: str) -> int:
        started.append(words)
        file = Path(words[words.index("--json") + 1])
        figures = {
            "step": record.figure(planned / 1.25, "s"),
            "sync": record.figure(0.0, "s"),
            "sampler gap": record.figure(0.05, "nats"),
        }
        record.write(file, words[words.index("--name") + 1], "a step", {}, figures)
        return 0

    monkeypatch.setattr(several_gpus, "num_gpus", lambda: 4)
    monkeypatch.setattr(several_gpus, "hardware", lambda: "4 x NVIDIA H200")
    monkeypatch.setattr(several_gpus, "free_memory", lambda: 2**40)
    monkeypatch.setattr(several_gpus, "run_child", measure)
    assert several_gpus.run(case, tmp_path / "model", tmp_path / "out") == 0
    (words,) = started
    assert words[0].endswith("ppo_step.py") and "all-4" in words and words[words.index("--gpu") + 1] == "h200"
    found = record.load(tmp_path / "out" / "ppo-7.6b-4-h200.json")
    figures = found["figures"]
    assert found["name"] == "ppo-7.6b-4-h200"
    assert figures["step, plan"] == record.figure(planned, "s", None)
    assert figures["step, error of the plan"] == record.figure(25.0, "%", None)
    assert "sync, error of the plan" not in figures and "sampler gap, plan" not in figures
    assert "train, plan" in figures and "train" not in figures


def test_a_run_that_measured_nothing_ends_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_gpus, "num_gpus", lambda: 4)
    monkeypatch.setattr(several_gpus, "hardware", lambda: "4 x NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(several_gpus, "free_memory", lambda: 2**40)
    monkeypatch.setattr(several_gpus, "run_child", lambda *_: 3)
    with pytest.raises(SystemExit, match=r"sequence-7\.6b-4 ended with exit code 3 before it had measured"):
        several_gpus.run(several_gpus.BY_NAME["sequence-7.6b-4"], None, tmp_path)


def test_an_optimiser_on_the_host_makes_training_slower_and_fills_the_host() -> None:
    case = several_gpus.BY_NAME["dpo-72b-8-host-adam"]
    plain = case._replace(arguments=case.arguments.partition(" --set ")[0])
    on_host, on_gpu = (forecasts.figures_of_plan(each, "h200") for each in (case, plain))
    assert on_host["rate"]["value"] < on_gpu["rate"]["value"]
    assert on_host[forecasts.HOST]["value"] > 1000 > on_gpu[forecasts.HOST]["value"]
    assert forecasts.fits(on_host, "h200") and not forecasts.fits(on_gpu, "h200")


def test_the_h100_arguments_replace_those_of_larger_gpus() -> None:
    case = several_gpus.BY_NAME["ppo-72b-lora-8-tp8"]
    both = [forecasts.parsed(case, kind, Path("none")) for kind in ("h200", "h100")]
    assert ["param_offload" in json.loads(arguments.set) for arguments in both] == [False, True]
    assert [arguments.gpu for arguments in both] == ["h200", "h100"]
