"""The wheel, installed where no checkout is near: `alignflow init` writes a recipe and `alignflow demo` runs
the whole lifecycle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.programs import captured

ROOT = Path(__file__).parents[2]
VERSION = "9.8.7"
PACKAGES = ("flows", "tasks", "evaluation", "rlhf_core")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]


def run(folder: Path, *command: str, seconds: float = 120) -> str:
    """Runs a command of the environment, outside of the checkout, and returns what it printed."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PREFECT_API_URL")
    }
    home = {
        "PREFECT_HOME": str(folder / "home"),
        "PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    done = captured(command, cwd=folder, env=kept | home, timeout=seconds)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a release is built: of a clone of the tracked files with a tag first an sdist, of that the wheel."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    tracked = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    git = [
        "git",
        "-c",
        "user.name=test",
        "-c",
        "user.email=t@example.org",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    ]
    for command in (
        ["init"],
        ["add", "--all", "--force"],
        ["commit", "--message", "all"],
        ["tag", f"v{VERSION}"],
    ):
        subprocess.run([*git, *command], cwd=source, check=True, capture_output=True)
    build_sdist = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-P", "-c", build_sdist, str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=300,
    )
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([*build, str(folder / f"alignflow-{VERSION}.tar.gz")], check=True, cwd=folder, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment: the wheel, and every package that this one has but ours."""
    folder = tmp_path_factory.mktemp("outside")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    into = [
        "--python",
        str(folder / "venv" / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", "pip", *into], check=True, timeout=120)
    # As a folder on the path, not as a site folder: a finder of an editable install in it is not started.
    (site / "engines.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_has_what_the_demo_and_type_checkers_need(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for kind in ("recipes", "demo", "tasks"):
        there = {path.name for path in (ROOT / "deployments" / kind).iterdir() if path.is_file()}
        assert there and {f"flows/shipped/{kind}/{name}" for name in there} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


def test_every_package_comes_from_the_wheel(folder: Path) -> None:
    assert VERSION in run(folder, "alignflow", "--version")
    look = f"import importlib\nfor name in {PACKAGES}: print(importlib.import_module(name).__file__)"
    found = run(folder, "python", "-P", "-c", look).splitlines()
    assert len(found) == 4 and all(path.startswith(str(folder / "venv")) for path in found)


def test_init_writes_a_recipe_that_is_valid(folder: Path) -> None:
    run(
        folder,
        "alignflow",
        "init",
        "mine",
        "--kind",
        "loop",
        "--base-model",
        "b",
        "--preference-data",
        "p",
        "--prompts",
        "q",
    )
    assert "ok, " in run(folder, "alignflow", "validate", "mine/recipe.yaml")


def test_the_demo_ends_with_its_page(folder: Path) -> None:
    told = run(folder, "alignflow", "demo", "--folder", "tried", seconds=2300)
    page = folder / "tried" / "artifacts" / "tiny-cpu" / "report.html"
    assert str(page) in told and "iterative_dpo" in page.read_text()
