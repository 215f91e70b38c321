"""requirements/lock.py, with a stand-in for uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import captured

ROOT = Path(__file__).resolve().parents[3]
WHEELS = {
    "1" * 64: "one-1-cp311-cp311-manylinux_2_28_x86_64.whl",
    "2" * 64: "one-1-cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
    "3" * 64: "one-1-cp39-abi3-manylinux_2_34_x86_64.whl",
    "4" * 64: "one-1-cp313-cp313-manylinux_2_28_x86_64.whl",
    "5" * 64: "one-1-cp312-cp312-musllinux_1_2_x86_64.whl",
    "6" * 64: "one-1-cp312-cp312-win_amd64.whl",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements/lock.py", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lock(project: Path, name: str, uv: str) -> subprocess.CompletedProcess[str]:
    (project / "uv").write_text(f"#!/bin/sh\n{uv}\n")
    (project / "uv").chmod(0o755)
    command = [sys.executable, str(project / "requirements/lock.py"), name]
    return captured(command, env={"PATH": f"{project}:{os.environ['PATH']}"}, timeout=60)


def pylock(wheels: dict[str, str], marker: str = "") -> str:
    files = ", ".join(
        f'{{ url = "https://index/{name}", hashes = {{ sha256 = "{digest}" }} }}'
        for digest, name in wheels.items()
    )
    source = f'sdist = {{ url = "https://index/one-1.tar.gz", hashes = {{ sha256 = "{"7" * 64}" }} }}'
    return f'[[packages]]\nname = "one"\nversion = "1"\n{marker}\n{source}\nwheels = [{files}]\n'


@pytest.mark.parametrize(
    ("name", "wheels", "kept"),
    [
        ("cpu", WHEELS, "1237"),  # aarch64 has no wheel for 3.11
        ("gpu", WHEELS, "3"),
        ("cpu", {"8" * 64: "one-1-py3-none-any.whl"}, "8"),
        ("cpu", {}, "7"),
    ],
)
def test_hashes_are_of_the_files_that_a_platform_installs(
    project: Path, name: str, wheels: dict[str, str], kept: str
) -> None:
    path = project / "requirements" / f"{name}.txt"
    path.write_text("# What it is.\none==1 \\\n    --hash=sha256:old\n")
    (project / "out").write_text(pylock(wheels, "marker = \"sys_platform == 'linux'\""))
    done = lock(project, name, f"cat > {project}/in; echo $* > {project}/arguments; cat {project}/out")
    assert done.returncode == 0, done.stderr
    hashes = " \\\n".join(f"    --hash=sha256:{digit * 64}" for digit in kept)
    assert path.read_text() == f"# What it is.\none==1 ; sys_platform == 'linux' \\\n{hashes}\n"
    arguments = (project / "arguments").read_text()
    assert ("--constraint" in arguments, "--no-deps" in arguments) == (name == "gpu", name == "cpu")
    assert str(path) in arguments
    assert "setuptools" in (project / "in").read_text()


def test_a_lock_that_uv_refuses_stays(project: Path) -> None:
    path = project / "requirements/cpu.txt"
    path.write_text("one==2\n")
    done = lock(project, "cpu", "echo No solution >&2; exit 1")
    assert done.returncode == 1
    assert done.stderr == f"No solution\n{path} is as it was: see uv's message above\n"
    assert path.read_text() == "one==2\n"
