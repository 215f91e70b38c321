"""Orchestration imports without torch, and no module hides an installed package. (Who may import what:
import-linter, `make lint`.)"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.system.gc_pause import uncollected
from tests.support.programs import captured

ROOT = Path(__file__).parents[3]
PACKAGES = ("flows", "tasks", "evaluation", "rlhf_core")
TORCH_FREE = [  # and all of flows/ and tasks/
    "evaluation.dashboard.dashboard_app",
    "evaluation.labelling.labelling_app",
    "evaluation.labelling.items",
    "evaluation.report.index",
    "evaluation.scores.leaderboard",
    "evaluation.report.run_page",
    "evaluation.report.summary",
    "rlhf_core.__main__",
    "flows.cli.dry_run",
    "rlhf_core.preflight.inputs",
    "rlhf_core.config",
    "rlhf_core.runs.launch",
    "rlhf_core.runs.lineage",
    "rlhf_core.recipe.loops.loop_state",
    "rlhf_core.migrate.script",
    "rlhf_core.recipe.plan",
    "rlhf_core.recipe.load_recipe",
    "rlhf_core.runs.run_dir",
    "rlhf_core.records",
]


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_orchestration_needs_no_torch() -> None:
    absent = ["torch", "transformers", "deepspeed", "ray", "vllm", "datasets", "tokenizers"]
    ours = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for name in ("flows", "tasks")
        for file in (ROOT / name).rglob("[!_]*.py")
    ]
    import_without(absent, sorted(ours) + TORCH_FREE)


def test_ranks_that_train_or_score_need_no_engine_and_no_judge() -> None:
    """They would import them for seconds."""
    roles = [f"rlhf_core.stages.ppo.roles.{name}" for name in ("actor", "read_only", "trained")]
    import_without(
        ["vllm", "prefect", "matplotlib", "openai"],
        [*roles, *(f"rlhf_core.stages.{name}" for name in ("sft", "reward_model", "dpo", "kto"))],
    )


def import_without(absent: Sequence[str], modules: Sequence[str]) -> None:
    script = f"import importlib, sys\nsys.modules.update(dict.fromkeys({absent}))\n" + "".join(
        f"importlib.import_module({module!r})\n" for module in modules
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = captured([sys.executable, "-c", script], env=environment, timeout=120)
    assert done.returncode == 0, done.stderr


# nothing in its folder is run as a script, which alone would put the folder on the path
NAMED_AFTER_A_PACKAGE = {"rlhf_core/rollout/vllm/__init__.py"}


def test_no_module_is_named_after_a_package() -> None:
    ours = {"alignflow"}
    foreign = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if not set(owners) <= ours
    }
    names = {
        path: path.parent.name if path.stem == "__init__" else path.stem
        for path in files()
        if path.stem != "__main__"
    }
    found = {str(path.relative_to(ROOT)) for path, name in names.items() if name in foreign}
    assert found == NAMED_AFTER_A_PACKAGE
    assert [package for package in PACKAGES if package in sys.stdlib_module_names] == []


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
