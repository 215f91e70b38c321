"""The house rules on imports: one direction, each heavy library in one place, orchestration without torch, no borrowed names."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_core.garbage import uncollected

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "flows": {"flows", "tasks", "evaluation", "rlhf_core"},
    "tasks": {"tasks", "evaluation", "rlhf_core"},
    "evaluation": {"evaluation", "rlhf_core"},
    "rlhf_core": {"rlhf_core"},
}
HOMES = {
    "prefect": ("flows/", "tasks/"),
    "ray": ("rlhf_core/cluster/",),
    "deepspeed": ("rlhf_core/engine/",),
    "vllm": ("rlhf_core/rollout/",),
}
TORCH_FREE = [  # and all of flows/ and tasks/
    "evaluation.index",
    "evaluation.leaderboard",
    "evaluation.page",
    "evaluation.summary",
    "rlhf_core.__main__",
    "rlhf_core.changes",
    "rlhf_core.check",
    "rlhf_core.config",
    "rlhf_core.launch",
    "rlhf_core.lineage",
    "rlhf_core.loops",
    "rlhf_core.migrate.script",
    "rlhf_core.plan",
    "rlhf_core.recipe",
    "rlhf_core.stage",
    "rlhf_core.types",
]


class Import(NamedTuple):
    file: str
    line: int
    module: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def files() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imports() -> Iterator[Import]:
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (Import(name, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}:{node.lineno} imports relatively"
                assert node.module is not None
                yield Import(name, node.lineno, node.module)


def test_imports_go_one_way() -> None:
    wrong = [i for i in imports() if i.package in MAY_IMPORT and i.package not in MAY_IMPORT[i.file.split("/")[0]]]
    assert wrong == []


def test_nobody_imports_tests_or_deployments() -> None:
    assert [i for i in imports() if i.package in ("tests", "deployments")] == []


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_has_one_home(library: str) -> None:
    found = [i for i in imports() if i.package == library]
    assert found, f"nobody imports {library}: has its home moved?"
    assert [i for i in found if not i.file.startswith(HOMES[library])] == []


def test_deepspeed_is_in_one_file() -> None:
    assert len({i.file for i in imports() if i.package == "deepspeed"}) == 1


def test_orchestration_needs_no_torch() -> None:
    absent = ["torch", "transformers", "deepspeed", "ray", "vllm", "datasets", "tokenizers"]
    ours = [f"{name}.{file.stem}" for name in ("flows", "tasks") for file in (ROOT / name).glob("[!_]*.py")]
    script = f"import importlib, sys\nsys.modules.update(dict.fromkeys({absent}))\n" + "".join(
        f"importlib.import_module({module!r})\n" for module in sorted(ours) + TORCH_FREE
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_module_is_named_after_a_package() -> None:
    ours = {"alignflow"}
    foreign = {name for name, owners in importlib.metadata.packages_distributions().items() if not set(owners) <= ours}
    names = {path: path.parent.name if path.stem == "__init__" else path.stem for path in files() if path.stem != "__main__"}
    assert [str(path.relative_to(ROOT)) for path, name in names.items() if name in foreign] == []
    assert [package for package in MAY_IMPORT if package in sys.stdlib_module_names] == []


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_after_imports_as_it_was_before(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ModuleNotFoundError), uncollected():
            assert not gc.isenabled()
            importlib.import_module("no_such_module")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
