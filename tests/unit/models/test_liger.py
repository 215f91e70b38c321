"""The choice of Liger's kernels for a model; the kernels need a GPU (tests/gpu)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.models.kernels import liger
from rlhf_core.models.load_model import load_policy
from tests.support.families import make_family


def installed(model: PreTrainedModel, apply: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `apply` Liger's function for the model's type, on a machine with a GPU."""
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {model.config.model_type: apply}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    for package in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("fault", [NotImplementedError, TypeError])
def test_a_family_that_liger_takes_in_part(
    fault: type[Exception],
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[bool] = []

    def apply(rope: bool, rms_norm: bool, model: PreTrainedModel) -> None:
        given.append(rope)
        if rope or fault is TypeError:
            raise fault("not of this family")

    model = load_policy(str(make_family("llama", material / "base", tmp_path / "model")), "bfloat16").model
    installed(model, apply, monkeypatch)
    assert liger.fuse(model) is model
    assert given == ([True, False] if fault is NotImplementedError else [True])
    assert (
        "Liger Kernel does not take LlamaForCausalLM (not of this family)" in capsys.readouterr().out
    ) == (fault is TypeError)


@pytest.mark.parametrize(
    ("family", "activations"), [("llama", True), ("mixtral", False), ("qwen3-moe", False)]
)
def test_experts_are_left_to_transformers(
    family: str, activations: bool, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, bool] = {}

    def apply(
        rope: bool, rms_norm: bool, swiglu: bool, fused_linear_cross_entropy: bool, model: PreTrainedModel
    ) -> None:
        given.update(rope=rope, rms_norm=rms_norm, swiglu=swiglu, loss=fused_linear_cross_entropy)

    model = load_policy(str(make_family(family, material / "base", tmp_path / "model")), "bfloat16").model
    installed(model, apply, monkeypatch)
    assert liger.fuse(model) is model
    assert given == {"rope": True, "rms_norm": True, "swiglu": activations, "loss": False}
