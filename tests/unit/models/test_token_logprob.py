"""Log-probs and entropies of tokens: their manual gradients against autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.models.logprobs import token_logprobs as module
from rlhf_core.models.logprobs.token_logprobs import Entropy, Truncation, token_logprobs

ROWS = 40
WIDTH = 16
VOCABULARY = 1000


def by_autograd(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax(head(hidden) / temperature, -1)
    return table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


def problem(dtype: torch.dtype, bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states and targets; for a quarter of the rows the target is likely: its gradient is a
    small difference."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = 3 * torch.randn(ROWS, WIDTH)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    hidden[:10] = 40 * head.weight.detach()[targets[:10]].float()
    return head, hidden.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("entropy", ["value", "gradient"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_autograd(
    keep: bool, entropy: Entropy, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(torch.float32, bias)
    upstream, more = torch.randn(2, ROWS)
    ours, our_entropy = token_logprobs(head, hidden, targets, 0.7, entropy, keep)
    exact_head = copy.deepcopy(head).double()
    exact_hidden = hidden.detach().double().requires_grad_()
    theirs, their_entropy = by_autograd(exact_head, exact_hidden, targets, 0.7)
    torch.testing.assert_close(ours, theirs.float())
    torch.testing.assert_close(our_entropy, their_entropy.float(), rtol=1e-5, atol=1e-5)
    assert our_entropy.requires_grad == (entropy == "gradient")
    loss = (ours * upstream).sum() + ((our_entropy * more).sum() if entropy == "gradient" else 0)
    exact_loss = (theirs * upstream).sum() + ((their_entropy * more).sum() if entropy == "gradient" else 0)
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
    exact = torch.autograd.grad(exact_loss, [exact_hidden, *exact_head.parameters()])
    for got, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_beyond_the_known_ones_have_no_probability_and_no_gradient(
    keep: bool, linear: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    known = 900
    head, hidden, targets = problem(torch.float32, bias)
    targets = targets % known
    upstream, more = torch.randn(2, ROWS)
    cut = nn.Linear(WIDTH, known, bias=bias)
    cut.load_state_dict({name: weight[:known] for name, weight in head.state_dict().items()})
    theirs = token_logprobs(cut, hidden, targets, 0.7, "gradient", keep)
    ours = token_logprobs(
        head if linear else nn.Sequential(head), hidden, targets, 0.7, "gradient", keep, known=known
    )
    torch.testing.assert_close(ours, theirs)
    loss, exact = ((found[0] * upstream).sum() + (found[1] * more).sum() for found in (ours, theirs))
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
    expected = torch.autograd.grad(exact, [hidden, *cut.parameters()])
    torch.testing.assert_close(gradients[0], expected[0])
    for got, wanted in zip(gradients[1:], expected[1:], strict=True):
        torch.testing.assert_close(got[:known], wanted)
        assert not got[known:].any()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize(
    "top", [Truncation(0.9), Truncation(1.0, 5), Truncation(0.7, 30), Truncation(1e-6), Truncation(1.0, 5000)]
)
def test_truncated_distributions(
    top: Truncation, keep: bool, linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside autograd over the kept tokens, which are found one by one; targets that would be cut are kept
    with all above them."""
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(torch.float32, bias=True)
    upstream, more = torch.randn(2, ROWS)
    used = head if linear else nn.Sequential(head)
    ours, our_entropy = token_logprobs(used, hidden, targets, 0.7, "gradient", keep, None, top)
    exact_head = copy.deepcopy(head).double()
    exact_hidden = hidden.detach().double().requires_grad_()
    scaled = exact_head(exact_hidden) / 0.7
    cut = 0
    outside = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    for row in range(ROWS):
        mass = 0.0
        order = scaled[row].argsort(descending=True).tolist()[: top.top_k or None]
        p = dict(zip(order, scaled[row][order].softmax(-1).tolist(), strict=True))
        for token in order:
            if mass < top.top_p:
                outside[row, token] = False
            mass += p[token]
        cut += bool(outside[row, targets[row]])
        outside[row] &= scaled[row] < scaled[row, targets[row]]
    assert (cut > 10) == (top.top_k < 1000), "the rest has no case of a token that is left out"
    table = torch.log_softmax(scaled.masked_fill(outside, float("-inf")), -1)
    theirs = table.gather(-1, targets[:, None]).squeeze(-1)
    their_entropy = -(table.exp() * table.masked_fill(outside, 0)).sum(-1)
    torch.testing.assert_close(ours, theirs.float())
    torch.testing.assert_close(our_entropy, their_entropy.float(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(
        (ours * upstream + our_entropy * more).sum(), [hidden, *head.parameters()]
    )
    exact = torch.autograd.grad(
        (theirs * upstream + their_entropy * more).sum(), [exact_hidden, *exact_head.parameters()]
    )
    for got, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


def test_bf16_gradients_are_fp32_numbers_rounded_once() -> None:
    head, hidden, targets = problem(torch.bfloat16, bias=False)
    logits = head(hidden).detach().requires_grad_()
    logprobs, sums, entropies = module._read_with_torch(logits.detach(), targets, 1.0, False, None)
    grads = torch.randn(ROWS)
    got = module._differentiate_with_torch(logits.detach(), targets, sums, entropies, grads, None, 1.0, None)
    theirs = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, theirs.detach())
    (expected,) = torch.autograd.grad((theirs * grads).sum(), logits)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-9)


def test_a_head_that_is_not_plain_is_run_as_it_is() -> None:
    head, hidden, targets = problem(torch.float32, bias=False)
    wrapped = nn.Sequential(head, nn.Tanh())
    ours, _ = token_logprobs(wrapped, hidden, targets, 1.0, "no", True)
    theirs, _ = by_autograd(wrapped, hidden, targets, 1.0)
    torch.testing.assert_close(ours, theirs)
    (got,), (expected,) = (torch.autograd.grad(values.sum(), head.weight) for values in (ours, theirs))
    torch.testing.assert_close(got, expected)


def test_such_a_head_is_read_in_chunks_unless_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(torch.float32, bias=False)
    wrapped = nn.Sequential(head, nn.Tanh())
    seen: list[int] = []
    wrapped.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    whole, _ = by_autograd(wrapped, hidden, targets, 1.0)
    (expected,) = torch.autograd.grad(whole.sum(), head.weight)
    seen.clear()
    chunked, _ = token_logprobs(wrapped, hidden, targets, 1.0, "no", False)
    assert max(seen) == 7
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked.sum(), head.weight)[0], expected)
    head.weight.ds_id = 0  # as ZeRO-3 marks its parameters
    seen.clear()
    token_logprobs(wrapped, hidden, targets, 1.0, "no", False)
    assert seen == [ROWS], "every rank calls it equally often"


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained policy also computes log-probs without gradient: then only a chunk of logits exists."""
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(torch.float32, bias=False)
    sizes: list[int] = []
    read = module._read_with_torch
    monkeypatch.setattr(
        module, "_read_with_torch", lambda logits, *rest: (sizes.append(len(logits)), read(logits, *rest))[1]
    )
    with torch.no_grad():
        token_logprobs(head, hidden, targets, 1.0, "no", True)
    assert max(sizes) == 7


def test_kept_logits_serve_one_backward_pass() -> None:
    head, hidden, targets = problem(torch.float32, bias=False)
    logprobs, _ = token_logprobs(head, hidden, targets, 1.0, "no", True)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        logprobs.sum().backward()


def test_the_head_is_called_once_with_its_hooks_and_keeps_its_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What gathers the weights of a sharded head is a hook: every rank must call it equally often."""
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    head, hidden, targets = problem(torch.float32, bias=False)
    calls: list[int] = []
    head.register_forward_pre_hook(lambda *_: calls.append(1))
    logprobs, entropies = token_logprobs(head, hidden, targets, 1.0, "no", False)
    logprobs.sum().backward()
    assert len(calls) == 1
    assert "forward" not in vars(head) and head(hidden).shape == (ROWS, VOCABULARY)
    assert torch.equal(entropies, torch.zeros(ROWS)), "nobody asked for them"


def test_no_rows_give_no_logprobs_and_a_gradient_of_zero() -> None:
    head, hidden, targets = problem(torch.float32, bias=False)
    logprobs, _ = token_logprobs(head, hidden[:0], targets[:0], 1.0, "no", True)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()
