"""Layers that carry state, with several documents in a row: the convolution, and the test that a kernel must
pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextPreTrainedModel

from rlhf_core.models.document_leak import detect_document_leak
from rlhf_core.models.kernels import attention, state_layers
from rlhf_core.models.kernels.state_layers import causal_conv1d, document_numbers
from rlhf_core.models.kernels.state_test import delta_rule, rejection_reason
from rlhf_core.models.policy import Policy
from tests.support.families import FAMILIES, SHAPE, config_class, model_class
from tests.support.state_kernels import take_edges
from tests.unit.models.test_attention import documents, kernel, logprobs_by_document  # noqa: F401

CPU = torch.device("cpu")
LENGTHS = (1, 2, 9, 3, 4, 1)


def test_tokens_have_the_number_of_their_document() -> None:
    positions = torch.cat([torch.arange(n) for n in (3, 1, 1, 2)])
    assert document_numbers(positions).tolist() == [[0, 0, 0, 1, 2, 3, 3]]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_convolution_starts_anew_with_each_document(
    size: int, activation: str | None, biased: bool
) -> None:
    tokens = sum(LENGTHS)
    rows = torch.randn(1, 5, tokens, requires_grad=True)
    upward = torch.randn(1, 5, tokens)
    weight = torch.randn(5, size, requires_grad=True)
    bias = torch.randn(5, requires_grad=True) if biased else None
    inputs = [part for part in (rows, weight, bias) if part is not None]
    numbers = document_numbers(torch.cat([torch.arange(n) for n in LENGTHS]))
    packed = causal_conv1d(rows, weight, bias, activation, seq_idx=numbers)
    alone = torch.cat([causal_conv1d(part, weight, bias, activation) for part in rows.split(LENGTHS, 2)], 2)
    torch.testing.assert_close(packed, alone)
    for ours, theirs in zip(
        *(torch.autograd.grad(found, inputs, upward) for found in (packed, alone)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_the_convolution_is_that_of_transformers(family: str) -> None:
    code: Any = state_layers._code_of(
        model_class(family)(config_class(family)(**SHAPE | {"vocab_size": 96} | FAMILIES[family][1]))
    )
    rows = torch.randn(2, 6, 11)
    weight = torch.randn(6, 4)
    bias = torch.randn(6)
    for activation in (None, "silu"):
        expected = code.causal_conv1d_fn(rows, weight, bias, activation=activation)
        torch.testing.assert_close(causal_conv1d(rows, weight, bias, activation), expected)


def by_document(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    parts = [part[0].float().split(cu_seqlens.diff().tolist()) for part in (q, k, v, g, beta)]
    return torch.cat([delta_rule(*split) for split in zip(*parts, strict=True)])[None].bfloat16(), None


def test_a_kernel_of_the_rule_is_taken() -> None:
    assert rejection_reason(by_document, 16, 8, CPU) is None


@pytest.mark.parametrize("wrong", ["edges", "decay", "gradient"])
def test_a_kernel_of_something_else_is_rejected(wrong: str) -> None:
    def wrong_kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        edges = cu_seqlens[[0, -1]] if wrong == "edges" else cu_seqlens
        found, state = by_document(q, k, v, g * 1.5 if wrong == "decay" else g, beta, edges)
        return (found * (1 + (beta - beta.detach()))[..., None] if wrong == "gradient" else found), state

    assert "computes something else" in (rejection_reason(wrong_kernel, 16, 8, CPU) or "")


def test_a_kernel_that_fails_is_named() -> None:
    def failing(*_: Tensor, **__: Any) -> tuple[Tensor, None]:
        raise RuntimeError("no kernel image")

    assert rejection_reason(failing, 16, 8, CPU) == "does not run here (RuntimeError: no kernel image)"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3-next", "qwen3_5-moe", "lfm2"])
def test_packed_documents_are_as_alone_where_layers_take_edges(
    family: str,
    kernel: list[int],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a GPU, but for kernels: attention and the delta rule of each document are computed in PyTorch."""
    torch.manual_seed(0)
    policy = Policy(
        model_class(family)(config_class(family)(**SHAPE | {"vocab_size": 96} | FAMILIES[family][1])).eval()
    )
    rows = [documents()[:3], documents()[3:]]
    expected = logprobs_by_document(policy, [[document] for row in rows for document in row])

    take_edges(policy.model, monkeypatch)
    assert attention._fits(policy.model)
    policy.model.set_attn_implementation(attention.VARLEN)
    assert attention.takes_varlen(policy.model) and not attention.can_share(policy.model, CPU)
    detect_document_leak(policy, policy, CPU, packed=True)
    assert policy.document_leak is False and not capsys.readouterr().out
    for ours, theirs in zip(logprobs_by_document(policy, rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert kernel


def test_packed_documents_need_a_gpu() -> None:
    model = model_class("lfm2")(
        config_class("lfm2")(**SHAPE | {"vocab_size": 96} | FAMILIES["lfm2"][1])
    ).bfloat16()
    assert not state_layers.takes_edges(model)


def test_the_code_that_is_replaced_is_the_backbones_also_under_a_class_of_ours() -> None:
    config = config_class("qwen3-next")(**SHAPE, **FAMILIES["qwen3-next"][1])
    made = type(
        "Scorer",
        (GenericForSequenceClassification, Qwen3NextPreTrainedModel),
        {"config_class": type(config), "__module__": __name__},
    )
    assert state_layers._code_of(made(config)) is modeling_qwen3_next
