"""Modules in the working directory that are named like ours hide nothing: of the command, of stages, or of
reward functions."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlhf_core.config import SFT
from rlhf_core.rewards.functions.function import Function
from rlhf_core.rewards.reward_contract import Sample
from rlhf_core.rollout.vllm.environment import server_environment
from rlhf_core.runs.launch import launch
from rlhf_core.runs.run_dir import RunDir
from tests.support import hostile
from tests.support.programs import captured
from tests.support.stage_request import stage_request

# What `alignflow`, the script that pip writes, does: its own folder is first on the module path, the working
# directory is not on it.
SCRIPT = "import sys\nfrom flows.cli import main\nsys.exit(main())\n"
STAGE = """
import json, subprocess, sys
from rlhf_core.runs.run_dir import Outcome, run_in_directory

def work(request, run):
    look = "import evaluation, flows, rlhf_core, tasks, tokenize as t; print(rlhf_core.__file__, tasks.__file__, flows.__file__)"
    seen = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout
    (run / "seen").write_text(seen)
    return Outcome({"loss": 1.0}, {"checkpoint": "seen"})

run_in_directory(sys.argv[1], work)
"""
FUNCTION = """
import subprocess, sys
from pathlib import Path
from helper import length

def lengths(responses):
    return [length(response) for response in responses]

def by_a_script(responses):
    script = Path(__file__).parent / "scripts" / "score.py"
    told = subprocess.run([sys.executable, str(script), *responses], check=True, capture_output=True, text=True).stdout
    return [float(word) for word in told.split()]
"""


def sample(response: str) -> Sample:
    return Sample([{"role": "user", "content": "p"}], response, {}, True, "p" + response)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with such modules, which none of the test's processes may import."""
    here = tmp_path / "here"
    hostile.write(here)
    for name, value in hostile.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(here)
    yield here
    assert hostile.imported(here) == ""


def test_the_modules_are_found_where_the_path_is_not_safe(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    hostile.write(tmp_path)
    done = captured([sys.executable, "-m", "flows.cli"], cwd=tmp_path, env=hostile.environment())
    assert "flows of the working directory was imported" in done.stderr
    assert hostile.imported(tmp_path).startswith("flows by")


@pytest.mark.slow
def test_validate_and_the_process_that_reads_its_tokenizers(
    folder: Path, material: Path, tmp_path: Path
) -> None:
    stage = {"max_len": 64, "data": {"sources": [str(material / "sft.jsonl")], "max_samples": 8}}
    recipe = {"name": "small", "base_model": str(material / "base"), "stages": {"sft": stage}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "alignflow").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "bin" / "alignflow"), "validate", "recipe.yaml", "--here"]
    done = captured(command, timeout=120)
    assert done.returncode == 0 and "everything that they need is available" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_stage_and_what_it_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stage_for_tests.py").write_text(STAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    run = RunDir(tmp_path / "run")
    run.prepare(stage_request(SFT.model_validate({"data": {"sources": "x"}}), digest="d"))
    assert launch("stage_for_tests", run.path, "sft", print).metrics == {"loss": 1.0}
    assert all(file.startswith(str(hostile.ROOT)) for file in (run / "seen").read_text().split())


@pytest.mark.slow
def test_our_own_stage_process_trains(folder: Path, material: Path, tmp_path: Path) -> None:
    data = {"sources": str(material / "sft.jsonl"), "max_samples": 8}
    sizes = {"max_len": 64, "train_batch_size": 8, "micro_train_batch_size": 8}
    run = RunDir(tmp_path / "run")
    base = str(material / "base")
    config = SFT.model_validate({"data": data, **sizes})
    run.prepare(stage_request(config, base, digest="d"))
    launch("rlhf_core", run.path, "sft", print)
    assert (run / "checkpoint" / "model.safetensors").is_file()


def test_a_reward_function_beside_such_modules(folder: Path) -> None:
    (folder / "reward.py").write_text(FUNCTION)
    (folder / "helper.py").write_text("def length(text): return len(text)\n")
    source = Function(folder / "reward.py", "lengths", 30.0, processes=1)
    try:
        assert source.score([sample("four")]).rewards.tolist() == [4]
    finally:
        source.close()


def test_a_script_that_a_reward_function_starts_finds_the_modules_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a terminal: a safe path is for our processes, not for the user's."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as a stage's process has it
    (folder / "reward.py").write_text(FUNCTION)
    (folder / "helper.py").write_text("def length(text): return len(text)\n")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "beside.py").write_text("def score(text): return 2 * len(text)\n")
    (folder / "scripts" / "score.py").write_text(
        "import sys\nfrom beside import score\nprint(*map(score, sys.argv[1:]))\n"
    )
    source = Function(folder / "reward.py", "by_a_script", 30.0, processes=1)
    try:
        assert source.score([sample("four"), sample("no")]).rewards.tolist() == [8, 4]
    finally:
        source.close()


def test_a_vllm_server_hands_a_safe_path_to_its_engine_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert server_environment(1.0)["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("page", ["deployments/prefect.yaml", "docs/how-to/loops.md"])
def test_a_worker_of_ones_own_is_started_with_a_safe_path(page: str) -> None:
    """Its flow runs have its environment: the pool's template takes none from a run."""
    starts = re.findall(
        r"^.*prefect worker start --pool alignflow-(?:process|ray).*$",
        (hostile.ROOT / page).read_text(),
        re.MULTILINE,
    )
    assert starts and all("PYTHONSAFEPATH=1" in start for start in starts)
