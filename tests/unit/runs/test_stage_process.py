"""`python -m rlhf_core RUN_DIR`: which errors are the user's, and what it says and returns for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from rlhf_core import __main__ as stage_process
from rlhf_core.config import KINDS, SFT
from rlhf_core.runs.run_dir import LOCK, Outcome, RunDir
from rlhf_core.system.files import is_locked
from tests.support.stage_request import stage_request


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    config = SFT.model_validate({"data": {"sources": "x.jsonl"}})
    RunDir(tmp_path / "sft").prepare(stage_request(config, digest="d"))
    return str(tmp_path / "sft")


def raise_in(module: str, error: Exception) -> object:
    """A stage's function, as if written in `module`, that raises."""
    space: dict[str, object] = {"__name__": module, "error": error}
    exec("def run(request, run):\n    raise error\n", space)
    return space["run"]


def main(run_dir: str, work: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(sys.modules, "work_for_test", cast(ModuleType, SimpleNamespace(run=work)))
    monkeypatch.setitem(KINDS, "sft", KINDS["sft"]._replace(module="work_for_test"))
    return stage_process.main([run_dir])


def test_done(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    assert main(run_dir, lambda request, run: Outcome({"loss": 1.0}, {}), monkeypatch) == 0
    result = RunDir(run_dir).result()
    assert result is not None and result.metrics == {"loss": 1.0}
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert main(run_dir, raise_in("rlhf_core.stages.sft", RuntimeError("not again")), monkeypatch) == 0


def test_our_value_error_is_one_line(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = raise_in("rlhf_core.stages.sft", ValueError("the data\nis empty: give rows"))
    assert main(run_dir, work, monkeypatch) == 2
    assert capsys.readouterr().err == "the data is empty: give rows\n"


def test_a_librarys_value_error_is_a_failure_with_its_traceback(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="shapes"):
        main(run_dir, raise_in("torch.nn", ValueError("shapes differ")), monkeypatch)


def test_a_missing_package_is_the_environments_fault(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = raise_in("rlhf_core.stages.sft", ModuleNotFoundError("no", name="vllm.core"))
    assert main(run_dir, work, monkeypatch) == 3
    assert "needs the package vllm.core" in capsys.readouterr().err
    unnamed = ModuleNotFoundError("Could not import module 'AutoProcessor'")
    unnamed.__cause__ = RuntimeError("install pycountry")
    unnamed.__cause__.__context__ = ModuleNotFoundError("no", name="pycountry")
    assert main(run_dir, raise_in("transformers", unnamed), monkeypatch) == 3
    assert "needs the package pycountry" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="no cause"):
        main(run_dir, raise_in("transformers", ModuleNotFoundError("no cause")), monkeypatch)
    with pytest.raises(ModuleNotFoundError):
        ours = ModuleNotFoundError("no", name="rlhf_core.gone")
        main(run_dir, raise_in("rlhf_core.stages.sft", ours), monkeypatch)


def test_what_is_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage_process.main([]) == 2
    assert stage_process.main([str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert stage_process.main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("run directory" in line for line in lines)


def test_a_kind_it_does_not_do(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage_process.main([run_dir], {"evaluation": "evaluation.evaluation_stage"}) == 2
    assert "of kind sft" in capsys.readouterr().err


def test_a_stage_of_another_package_is_refused(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage_process.main([run_dir], "evaluation") == 2
    told = capsys.readouterr().err
    assert "is of kind sft, which this command does not do; it does evaluation, " in told
    assert "alignment_tax" in told
    assert "dpo" not in told


def test_imports_are_told_and_belong_to_the_stage(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line comes before the libraries, the directory is locked while they are imported (pages show such a
    stage as running), and the result's seconds are those since the process was started."""
    seen: list[tuple[str, bool]] = []

    def imported(name: str) -> object:
        seen.append((capsys.readouterr().out, is_locked(RunDir(run_dir) / LOCK)))
        return SimpleNamespace(run=lambda request, run: Outcome({}, {}))

    monkeypatch.setattr(stage_process, "importlib", SimpleNamespace(import_module=imported))
    monkeypatch.setattr(stage_process, "age_of_this_process", lambda: 40.0)
    assert stage_process.main([run_dir]) == 0
    assert seen == [("importing the libraries of SFT\n", True)]
    result = RunDir(run_dir).result()
    assert result is not None and 40 <= result.seconds < 100


def test_the_age_of_a_process_counts_from_its_start() -> None:
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import time; time.sleep(0.3); from rlhf_core.system import processes as p;"
                " print(p.age_of_this_process())"
            ),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert 0.3 <= float(told.stdout) < 100


@pytest.mark.parametrize("told", [True, False])
def test_a_process_that_waits_runs_the_stage_it_is_told(
    run_dir: str, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setitem(
        sys.modules,
        "work_for_test",
        cast(ModuleType, SimpleNamespace(run=lambda request, run: Outcome({}, {}))),
    )
    monkeypatch.setitem(KINDS, "sft", KINDS["sft"]._replace(module="work_for_test"))
    monkeypatch.setattr(sys, "argv", ["x"])
    reads, writes = os.pipe()
    with os.fdopen(writes, "wb") as pipe:
        if told:
            pipe.write(json.dumps({"run_dir": run_dir, "environment": {}}).encode() + b"\n")
    assert stage_process.main(["--wait", "sft", str(reads)]) == 0
    assert (RunDir(run_dir).result() is not None) == told
    assert sys.argv == (["x", run_dir] if told else ["x"])
