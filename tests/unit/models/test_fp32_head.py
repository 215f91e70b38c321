"""A head in fp32: log-probs as plain PyTorch computes them in fp32 from the same 16-bit hidden states, and
gradients that only the factors' rounding moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config import Lora
from rlhf_core.models.logprobs import fp32_head, token_logprobs
from rlhf_core.models.logprobs.fp32_head import fp32_forward, fp32_product
from rlhf_core.models.logprobs.logit_scale import backbone_of
from rlhf_core.models.logprobs.token_logprobs import Truncation
from rlhf_core.models.lora import add_lora
from rlhf_core.models.policy import Policy
from tests.unit.models.test_models import FAMILIES, SHAPE

WIDTH = 32
HALF = [torch.bfloat16, torch.float16]


def problem(
    dtype: torch.dtype, rows: int, vocabulary: int, bias: bool = False
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head whose logits are about 20 at most, hidden states (rows, WIDTH), and targets that are likely for
    half of the rows."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, vocabulary, bias=bias)
    nn.init.normal_(head.weight, std=0.6)
    hidden = 1.5 * torch.randn(rows, WIDTH)
    targets = torch.randint(vocabulary, (rows,))
    hidden[1::2] = 1.5 * head.weight.detach()[targets[1::2]]
    return head.to(dtype), hidden.to(dtype).requires_grad_(), targets


def exact(head: nn.Linear, hidden: Tensor, targets: Tensor, cap: float | None, scale: float = 1.0) -> Tensor:
    """The log-probs in fp64."""
    logits = hidden.double() @ head.weight.double().t()
    if head.bias is not None:
        logits = logits + head.bias.double()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return (logits * scale).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("vocabulary", "bias", "cap"), [(151_936, False, None), (3000, True, None), (3000, False, 9.0)]
)
def test_log_probs_are_those_of_fp32(
    dtype: torch.dtype,
    rows: int,
    vocabulary: int,
    bias: bool,
    cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(dtype, rows, vocabulary, bias)
    with torch.no_grad():
        expected = exact(head, hidden, targets, cap, 1 / 0.7)
        ours, plain = (
            token_logprobs.token_logprobs(head, hidden, targets, 0.7, "no", True, cap, fp32=on)[0]
            for on in (True, False)
        )
    torch.testing.assert_close(ours, expected.float(), atol=2e-5, rtol=2e-6)
    # what the option is for
    assert (plain - expected).abs().max() > 100 * (ours - expected).abs().max()


@pytest.mark.parametrize("top", [Truncation(0.8, 0), Truncation(1.0, 5)])
def test_a_truncated_row_keeps_the_tokens_that_fp32_keeps(top: Truncation) -> None:
    head, hidden, targets = problem(torch.bfloat16, 16, 500)
    with torch.no_grad():
        ours = token_logprobs.token_logprobs(head, hidden, targets, 1.0, "no", False, None, top, fp32=True)
        wide = head.float(), hidden.detach().float()
        theirs = token_logprobs.token_logprobs(*wide, targets, 1.0, "no", False, None, top)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours[0].double(), exact(head, hidden, targets, None), atol=1e-3)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("cap", [None, 9.0])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_fp32(
    dtype: torch.dtype, cap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(dtype, 20, 300, bias)
    upward = torch.randn(20)
    ours = token_logprobs.token_logprobs(head, hidden, targets, 1.0, "no", True, cap, fp32=True)[0]
    found = torch.autograd.grad((ours * upward).sum(), [hidden, *head.parameters()])
    theirs = exact(head, hidden, targets, cap)
    expected = torch.autograd.grad((theirs * upward.double()).sum(), [hidden, *head.parameters()])
    # of the rounding of the logits' gradients, of the products, and of their results
    near = max(2 * torch.finfo(dtype).eps, 1e-6)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted.double()).norm() < near * wanted.double().norm()


def test_the_logits_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two backward passes are possible."""
    head, hidden, targets = problem(torch.bfloat16, 5, 100)
    ours = token_logprobs.token_logprobs(head, hidden, targets, 1.0, "no", True, fp32=True)[0]
    first, second = (torch.autograd.grad(ours.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_blocks_of_the_weights_do_not_change_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, _ = problem(torch.bfloat16, 6, 100, bias=True)
    whole = fp32_product(hidden, head.weight, head.bias)
    monkeypatch.setattr(fp32_head, "ROWS", 33)
    torch.testing.assert_close(fp32_product(hidden, head.weight, head.bias), whole)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(fp32_forward(head, hidden[None]), whole[None])
    assert fp32_product(hidden[:0], head.weight).shape == (0, 100)


def of_policy(policy: Policy, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1])[None]
    return policy(tokens, positions, torch.zeros_like(tokens)).logprobs[0, 1:]


def by_hand(policy: Policy, tokens: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """Log-probs with the logits of `head` in fp64, capped and scaled as the model does."""
    hidden = backbone_of(policy.model)(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
    logits = head(hidden)
    if policy.cap is not None:
        logits = policy.cap * torch.tanh(logits / policy.cap)
    return (logits * policy.scale).log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize("name", ["qwen2-tied", "llama", "gemma2", "granite", "cohere"])
def test_policies_of_families(name: str) -> None:
    """Tied and untied heads, a cap, and scaled logits."""
    torch.manual_seed(0)
    policy = Policy(FAMILIES[name]().to(torch.bfloat16)).eval()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(20)
    tokens = torch.randint(1, SHAPE["vocab_size"], (1, 24))
    with torch.no_grad():
        weight = policy.model.get_output_embeddings().weight.double()
        expected = by_hand(policy, tokens, lambda hidden: hidden.double() @ weight.t())
        plain = of_policy(policy, tokens)
        policy.fp32_head = True
        ours = of_policy(policy, tokens)
    torch.testing.assert_close(ours, expected.float(), atol=2e-5, rtol=1e-5)
    assert (plain - expected).abs().max() > 20 * (ours - expected).abs().max()


def test_a_head_with_adapters() -> None:
    torch.manual_seed(0)
    policy = Policy(FAMILIES["llama"]().to(torch.bfloat16)).train()
    add_lora(policy.model, Lora(rank=4, alpha=8, targets=("lm_head",)), seed=0)
    head: Any = policy.model.get_output_embeddings()
    a = head.lora_A["default"].weight
    b = head.lora_B["default"].weight
    nn.init.normal_(b)
    policy.fp32_head = True
    tokens = torch.randint(1, SHAPE["vocab_size"], (1, 24))
    ours = of_policy(policy, tokens)

    def logits(hidden: Tensor) -> Tensor:
        wide = hidden.double()
        return wide @ head.base_layer.weight.double().t() + 2.0 * wide @ a.double().t() @ b.double().t()

    expected = by_hand(policy, tokens, logits)
    torch.testing.assert_close(ours, expected.float(), atol=2e-5, rtol=1e-5)
    found, wanted = (torch.autograd.grad(each.sum(), [a, b]) for each in (ours, expected))
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() < 0.01 * want.norm()
    assert "forward" not in vars(head.base_layer), "it was replaced for the pass alone"
