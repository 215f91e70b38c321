"""The table of changes to vLLM: complete, fitting the installed release, and refused with a release that is
not tested."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.rollout.vllm import patches
from rlhf_core.rollout.vllm.patches import table
from rlhf_core.rollout.vllm.patches.table import (
    PATCHES,
    TESTED,
    apply_patches,
    installed_release,
    is_release,
    patches_for,
    untested,
)
from rlhf_core.system.machine import MachineLacks
from tests.support.programs import captured

# What each patch replaces or reads, in the releases that it is for; `memory_share` and `warm_up` need a GPU's
# worker.
PRIVATE = {
    "language_models": ["vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights"],
    "model_configs": ["vllm.config.model:get_config"],
    "rotary_heads": [
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
    ],
    "rendezvous": [
        "vllm.v1.executor.multiproc_executor:get_distributed_init_method",
        "vllm.v1.executor.uniproc_executor:get_distributed_init_method",
    ],
    "gpt_oss_experts": ["vllm.model_executor.models.gpt_oss:GptOssModel._load_weights_other"],
    "fp32_heads": ["vllm.model_executor.layers.logits_processor:LogitsProcessor._get_logits"],
    "qwen2_runner": ["vllm.config.engine:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"],
    "token_ranks": ["vllm.v1.sample.sampler:batched_count_greater_than"],
    "packed_experts": [],
    "vocabulary_rows": ["vllm.model_executor.models.qwen2:Qwen2ForCausalLM.compute_logits"],
    "memory_share": ["vllm.v1.worker.gpu_worker:Worker.determine_available_memory"],
    "warm_up": ["vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model"],
}


@pytest.fixture
def _afresh() -> Iterator[None]:
    apply_patches.cache_clear()
    yield
    apply_patches.cache_clear()


def test_every_module_of_the_folder_is_in_the_table() -> None:
    modules = {path.stem for path in Path(patches.__path__[0]).glob("*.py")} - {
        "__init__",
        "table",
        "gpu_worker",
    }
    assert modules == {patch.module for patch in PATCHES} == PRIVATE.keys()
    for patch in PATCHES:
        assert (
            set(patch.releases) <= set(TESTED) and patch.does.endswith(".") and patch.ends_with.endswith(".")
        ), patch


@pytest.mark.parametrize("patch", patches_for(installed_release() or ""), ids=lambda patch: patch.module)
def test_the_installed_release_has_what_a_patch_changes(patch: table.Patch) -> None:
    for place in PRIVATE[patch.module]:
        module, _, names = place.partition(":")
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    assert (
        callable(getattr(import_module(f"{patches.__name__}.{patch.module}"), "apply", None))
        is patch.at_start
    )


def test_arguments_of_the_installed_release_are_those_that_patches_pass() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    apply_patches()
    assert [*inspect.signature(RotaryEmbedding.forward_native).parameters] == [
        "self",
        "positions",
        "query",
        "key",
    ]
    assert [*inspect.signature(DefaultModelLoader.get_all_weights).parameters] == [
        "self",
        "model_config",
        "model",
    ]


@pytest.mark.parametrize("release", ["0.23.1", "0.25.0", "0.31.2", "0.33.0", "1.0.0"])
def test_a_release_that_is_not_tested_is_refused_before_anything_is_changed(
    release: str, _afresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "installed_release", lambda: release)
    monkeypatch.setattr(table, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(
        MachineLacks, match=rf"vLLM {release} is not tested: .* 0\.24\.x and 0\.32\.x; install one of these"
    ):
        apply_patches()
    assert untested(release) and not patches_for(release)


def test_patches_of_a_release_are_applied_once(_afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []

    class Module:
        def __init__(self, name: str):
            self.apply = lambda: applied.append(name.rpartition(".")[2])

    monkeypatch.setattr(table, "import_module", Module)
    monkeypatch.setattr(table, "installed_release", lambda: "0.24.0")
    apply_patches()
    apply_patches()
    assert applied == [patch.module for patch in PATCHES if patch.at_start]
    assert is_release("0.24.") and not is_release("0.32.") and untested("0.24.0") is untested(None) is None


def test_the_table_is_read_without_heavy_libraries() -> None:
    code = (
        "import sys, rlhf_core.rollout.vllm.patches.table; print([m for m in ('torch', 'vllm') if m in"
        " sys.modules])"
    )
    done = captured([sys.executable, "-c", code], timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_docs_have_the_table() -> None:
    page = (Path(patches.__path__[0]).parents[3] / "docs/explanation/private-parts.md").read_text()
    for patch in PATCHES:
        releases = ", ".join(release.rstrip(".") for release in patch.releases)
        assert f"| `{patch.module}` | {releases} | {patch.does} | {patch.ends_with} |" in page
