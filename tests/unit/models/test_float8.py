"""FP8 and Liger's kernels in training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.models.kernels import float8, liger
from rlhf_core.models.kernels.float8 import FP8, multiply, pays, rounded_rows, transposed, use_float8
from rlhf_core.models.load_model import load_policy
from tests.support.families import make_family
from tests.support.programs import captured

INTERPRETED = """
import torch
from rlhf_core.models.kernels.float8 import rounded_rows
from rlhf_core.models.kernels.round_rows import round_rows, transpose

numbers = torch.Generator().manual_seed(0)
for columns in (48, 1500):
    rows = torch.randn(7, columns + 3, generator=numbers)[:, :columns]
    rows[3], rows[5, 7], rows[6, 9] = 0, float("nan"), float("inf")
    for factors in (None, torch.rand(columns, generator=numbers)):
        # To fp16: the interpreter rounds some numbers to FP8 wrongly.
        found, scales = round_rows(rows, factors, torch.float16)
        values = rows if factors is None else rows * factors
        wanted = values.abs().amax(1).clamp(min=1e-35) / 65504
        torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=1e-40, equal_nan=True)
        torch.testing.assert_close(found.float()[:5], (values / wanted[:, None])[:5], rtol=1e-3, atol=1e-7)
    in_bytes = rounded_rows(rows)[0]
    assert torch.equal(transpose(in_bytes).view(torch.uint8), in_bytes.view(torch.uint8).t())
print("compared")
"""


def test_rows_are_rounded_to_fp8_times_their_scales() -> None:
    rows = torch.randn(9, 64) * torch.logspace(-3, 3, 9)[:, None]
    rows[4] = 0
    rounded, scales = rounded_rows(rows)
    error = (rounded.float() * scales[:, None] - rows).abs()
    # Half the distance of neighbouring numbers: 2^-4 of a number's own size, or of the smallest normal one,
    # 2^-6.
    assert (error <= (rows.abs() / 16).maximum(scales[:, None] * 2.0**-10) * 1.001).all()
    assert rounded.float().abs().amax(1).tolist() == [448.0] * 4 + [0.0] + [448.0] * 4
    for wrong in (float("nan"), float("inf")):
        strange, of_strange = rounded_rows(torch.tensor([[1.0, wrong], [1.0, 2.0]]))
        assert (strange.float() * of_strange[:, None]).isfinite().all(1).tolist() == [False, True]
    factors = torch.rand(64)
    weighted, of_weighted = rounded_rows(rows, factors)
    again, of_again = rounded_rows(rows * factors)
    assert torch.equal(weighted.float(), again.float()) and torch.equal(of_weighted, of_again)


def test_gradients_are_those_of_the_rounded_product() -> None:
    """The weights' is exact; the inputs' is the product of the gradient with the same rounded weights as in
    the forward pass."""
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    hidden = torch.randn(3, 11, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(3, 11, 48, dtype=torch.bfloat16)
    exact = layer(hidden)
    exact.backward(grad)
    of_hidden = hidden.grad
    of_weight = layer.weight.grad
    of_bias = layer.bias.grad
    assert of_hidden is not None
    hidden.grad = None
    layer.weight.grad = None
    layer.bias.grad = None
    found = float8._forward(layer, hidden)
    found.backward(grad)
    assert torch.equal(layer.weight.grad, of_weight) and torch.equal(layer.bias.grad, of_bias)  # type: ignore[arg-type]
    assert 0.01 < distance(found, exact) < 0.05
    rounded, scales = rounded_rows(layer.weight.detach())
    weight = rounded.float() * scales[:, None]
    assert distance(hidden.grad, grad.float() @ weight) < 0.03 < distance(hidden.grad, of_hidden) < 0.05  # type: ignore[arg-type]


def test_a_layer_without_tokens() -> None:
    hidden = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    layer = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    float8._forward(layer, hidden).sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 32) and not layer.weight.grad.any()  # type: ignore[union-attr]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_products_sum_in_fp32() -> None:
    left, right = (torch.randn(size, 32).to(FP8) for size in (5, 7))
    scales = torch.rand(5), torch.rand(7)
    expected = (left.double() * scales[0][:, None]) @ (right.double() * scales[1][:, None]).t()
    torch.testing.assert_close(
        multiply(left, scales[0], right, scales[1], torch.float32).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(transposed(left).float(), left.float().t())


def small(monkeypatch: pytest.MonkeyPatch, least: int) -> Qwen2ForCausalLM:
    monkeypatch.setattr(float8, "PAYS_FROM", least)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=96, **shape)).to(torch.bfloat16)


def test_large_layers_multiply_in_fp8_and_the_head_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pays(8960, 1536)
    assert pays(3584, 3584)
    assert not pays(1536, 1536)
    assert not pays(512, 3584)
    assert not pays(4100, 4100)
    model = small(monkeypatch, 16)
    # queries, outputs and three of the feed-forward block, not keys and values of 16
    assert use_float8(model) == 2 * 5
    found = [name for name, part in model.named_modules() if "forward" in vars(part)]
    assert len(found) == 10 and not any(name.endswith(("lm_head", "k_proj", "v_proj")) for name in found)
    with pytest.raises(
        ValueError, match="Qwen2ForCausalLM has no linear layer that is large enough for FP8 to be faster"
    ):
        use_float8(small(monkeypatch, 1024))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        RuntimeError, match=r"float8 needs a GPU of compute capability 8.9 or later, and this one has 8.0"
    ):
        use_float8(small(monkeypatch, 16))


def test_a_model_learns_as_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same start, the same documents: losses fall together."""
    tokens = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(0))
    curves = []
    for rounds in (False, True):
        torch.manual_seed(0)
        model = small(monkeypatch, 16)
        if rounds:
            use_float8(model)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for _ in range(30):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss))
        curves.append(curve)
    exact, rounded = curves
    assert exact != rounded and exact[-1] < exact[0] - 0.5
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 0.03 * exact[0]


def test_kernels_round_and_transpose_as_pytorch_does() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = captured([sys.executable, "-c", INTERPRETED], env=environment, timeout=300)
    assert done.stdout == "compared\n", done.stderr[-2000:]


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
