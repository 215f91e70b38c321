"""Adds a kind of stage, as in CONTRIBUTING.md and as a package of its own, and runs it: digest, gates,
lineage and page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
RECIPE = """
name: soups
base_model: base
stages:
  first: {stage: soup, other: other, share: 0.25}
  second: {stage: soup, model: first, other: other, gates: [{metric: distance, max: 3.5}]}
"""
PACKAGED = """
name: soups
base_model: base
stages:
  blend: {stage: soup, other: other, share: 0.25, gates: [{metric: distance, max: 5}]}
"""
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Returns a copy of the packages with the files and lines of CONTRIBUTING.md."""
    for package in ("flows", "tasks", "evaluation", "rlhf_core"):
        shutil.copytree(
            ROOT / package, tmp_path / "code" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = dict(re.findall(r"^```python\n# (rlhf_core/[\w/]+\.py)\n(.*?)^```", page, re.M | re.S))
    assert list(files) == ["rlhf_core/config/soup.py", "rlhf_core/stages/soup.py"]
    for path, text in files.items():
        (tmp_path / "code" / path).write_text(text)
    imported, entry = re.findall(r"^\+ (.*)$", page, re.M)
    kinds = tmp_path / "code" / "rlhf_core" / "config" / "kinds.py"
    text = kinds.read_text().replace("\n\n\nclass Kind", f"\n{imported}\n\n\nclass Kind")
    text = text.replace("KINDS = {\n", f"KINDS = {{\n{entry}\n")
    assert len(text.splitlines()) == len(kinds.read_text().splitlines()) + 2
    kinds.write_text(text)
    return tmp_path / "code"


@pytest.fixture
def alignflow(code: Path, tmp_path: Path, prefect: str) -> Command:
    """Returns the command of that copy, in a folder with two models and a recipe."""
    return command_in(tmp_path / "work", RECIPE, {"PYTHONPATH": str(code), "PREFECT_API_URL": prefect})


def command_in(work: Path, recipe: str, variables: dict[str, str]) -> Command:
    """Returns the command in a new folder with two models and a recipe."""
    for name, value in (("base", 1.0), ("other", 3.0)):
        (work / name).mkdir(parents=True)
        (work / name / "config.json").write_text("{}")
        save_file(
            {f"layer{n}": np.full((2, 2), value * (n + 1), np.float32) for n in range(3)},
            work / name / "model.safetensors",
        )
    (work / "recipe.yaml").write_text(recipe)
    environment = {**os.environ, **variables}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", *words]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=200)

    return run


def run_dir(work: Path, name: str) -> Path:
    """Returns a stage's only directory."""
    (found,) = (work / "artifacts" / "stages").glob(f"{name}-*")
    return found


def test_a_kind_added_as_documented(alignflow: Command, code: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    done = alignflow("run", "recipe.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    first = run_dir(work, "first")
    second = run_dir(work, "second")

    weights = [
        float(load_file(folder / "checkpoint" / "model.safetensors")["layer0"][0, 0])
        for folder in (first, second)
    ]
    assert weights == [1.5, 2.25], "3/4 of 1 and 1/4 of 3; half of that and half of 3"
    assert json.loads((second / "result.json").read_text())["metrics"] == {
        "distance": 3.0 * (1 + 2 + 3) / 2 / 3
    }

    page = (work / "artifacts" / "soups" / "report.html").read_text()
    assert "curves of second" in page and page.count(">distance<") >= 2 and "Is my Soup bad?" in page
    assert "second: distance 3" in (work / "artifacts" / "index.html").read_text()
    assert "distance 3" in alignflow("stages", "artifacts").stdout

    told = alignflow("lineage", str(second / "checkpoint")).stdout
    assert (
        told.startswith("second (soup) ") and "── first (soup) " in told and "    ├── base (folder) " in told
    )


def test_gates_and_digests_of_an_added_kind(alignflow: Command, code: Path) -> None:
    wrong = alignflow("validate", "recipe.yaml", "second.gates=[{metric: distanse, max: 1}]")
    assert wrong.returncode == 2 and "unknown metric 'distanse'; did you mean distance?" in wrong.stderr
    wrong = alignflow("validate", "recipe.yaml", "second.model=thrid")
    assert wrong.returncode == 2 and "stages.second.model: unknown name 'thrid'" in wrong.stderr
    assert "2 to run, 0 to resume, 0 to skip" in alignflow("run", "recipe.yaml", "--dry-run").stdout

    failed = alignflow("run", "recipe.yaml", "first.gates=[{metric: distance, max: 1.0}]")
    assert failed.returncode == 1
    assert "distance is 4, and the gate requires at most 1" in failed.stdout + failed.stderr
    # a gate is in no digest
    assert "1 to run, 0 to resume, 1 to skip" in alignflow("run", "recipe.yaml", "--dry-run").stdout
    told = alignflow("run", "recipe.yaml", "first.share=0.5", "--dry-run").stdout
    assert "2 to run, 0 to resume, 0 to skip" in told
    kinds = code / "rlhf_core" / "config" / "kinds.py"
    kinds.write_text(kinds.read_text().replace('f"{STAGES}.soup",', 'f"{STAGES}.soup", 99,'))
    # its version is
    assert "2 to run, 0 to resume, 0 to skip" in alignflow("run", "recipe.yaml", "--dry-run").stdout


@pytest.fixture
def installed(tmp_path: Path, prefect: str) -> Command:
    """Returns the command where the package of docs/how-to/own-stages.md is installed."""
    page = (ROOT / "docs/how-to/own-stages.md").read_text()
    files = dict(re.findall(r"^```\w+\n# ([\w/.]+)\n(.*?)^```", page, re.M | re.S))
    assert list(files) == ["pyproject.toml", "acme_soup/kind.py", "acme_soup/run.py"]
    for path, text in files.items():
        (tmp_path / "package" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / path).write_text(text)
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    install = [sys.executable, "-m", "pip", "install", *options, str(tmp_path / "package")]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    return command_in(tmp_path / "work", PACKAGED, {"PYTHONPATH": path, "PREFECT_API_URL": prefect})


def test_a_kind_of_an_installed_package(installed: Command, tmp_path: Path) -> None:
    work = tmp_path / "work"
    wrong = installed("validate", "recipe.yaml", "blend.share=2", "blend.gates=[{metric: distanse, max: 1}]")
    assert wrong.returncode == 2 and "stages.blend.share" in wrong.stderr
    done = installed("run", "recipe.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    blend = run_dir(work, "blend")
    assert float(load_file(blend / "checkpoint" / "model.safetensors")["layer0"][0, 0]) == 1.5
    page = (work / "artifacts" / "soups" / "report.html").read_text()
    assert page.count(">distance<") >= 2 and "Is my Soup bad?" in page
    assert installed("lineage", str(blend / "checkpoint")).stdout.startswith("blend (soup) ")

    save_file({"other": np.zeros(2, np.float32)}, work / "other" / "model.safetensors")
    failed = installed("run", "recipe.yaml")
    assert failed.returncode == 2
    assert "have weights of other names: name models of one shape" in failed.stdout + failed.stderr
    assert "stage soup" in installed("doctor").stdout
