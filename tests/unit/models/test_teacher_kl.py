"""The KL to a teacher over its most probable tokens: its value and gradient beside the whole distributions, in
double precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_core.models.logprobs import token_logprobs as module
from rlhf_core.models.logprobs import top_logprobs as teacher_module
from rlhf_core.models.logprobs.teacher_kl import TopTokens
from rlhf_core.models.logprobs.token_logprobs import token_logprobs
from rlhf_core.models.logprobs.top_logprobs import top_logprobs

ROWS = 30
WIDTH = 16
VOCABULARY = 300
HEAT = 0.7  # temperature


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_CHUNK", 7)
    monkeypatch.setattr(teacher_module, "LOGITS_CHUNK", 8)


def problem() -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    """The heads of student and teacher, hidden states that both read, and targets. The teacher is sure of its
    token in a third of the rows, and the student of another one in some of these."""
    torch.manual_seed(0)
    student = nn.Linear(WIDTH, VOCABULARY, bias=True)
    teacher = nn.Linear(WIDTH, VOCABULARY, bias=True)
    hidden = 3 * torch.randn(ROWS, WIDTH)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    hidden[:10] = 60 * teacher.weight.detach()[targets[:10]]
    hidden[5:10] += 40 * student.weight.detach()[targets[5:10] - 1]
    return student, teacher, hidden.requires_grad_(), targets


def tops(head: nn.Linear, hidden: Tensor, targets: Tensor, count: int, **how: object) -> TopTokens:
    found = top_logprobs(head, hidden, targets, HEAT, count, **how)  # type: ignore[arg-type]
    k = (len(found) - 2) // 2
    return TopTokens(found[1 : 1 + k].t().long(), found[1 + k :].t().contiguous())


def table_of(head: nn.Linear, hidden: Tensor) -> Tensor:
    return torch.log_softmax(head(hidden) / HEAT, -1)


def cells(table: Tensor, ids: Tensor) -> Tensor:
    """Probabilities (N, k + 1) of the cells, in plain words."""
    p = table.exp()
    outside = torch.ones_like(p).scatter(-1, ids, 0)
    return torch.cat([p.gather(-1, ids), (p * outside).sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("count", [1, 5, 299, 300, 1024])
def test_a_teachers_most_probable_tokens_and_the_mass_of_the_others(count: int) -> None:
    _, teacher, hidden, targets = problem()
    found = tops(teacher, hidden, targets, count)
    exact = table_of(copy.deepcopy(teacher).double(), hidden.detach().double())
    best = exact.topk(min(count, VOCABULARY), -1)
    assert torch.equal(found.ids.sort(-1).values, best.indices.sort(-1).values)
    torch.testing.assert_close(found.logprobs[:, :-1], best.values.float(), rtol=1e-4, atol=1e-4)
    if count < VOCABULARY:
        rest = exact.scatter(-1, best.indices, float("-inf")).logsumexp(-1)
        torch.testing.assert_close(found.logprobs[:, -1], rest.float(), rtol=1e-4, atol=1e-4)
        assert count == 1 or rest.min() < -16, "1 minus the other masses would be 0 there"
    else:
        assert (found.logprobs[:, -1] == float("-inf")).all()
    own = top_logprobs(teacher, hidden, targets, HEAT, count)[0]
    torch.testing.assert_close(own, token_logprobs(teacher, hidden, targets, HEAT, "no", False)[0])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_values_and_gradients_beside_autograd(
    keep: bool, linear: bool, cap: float | None, count: int
) -> None:
    """With gradients of log-probs and entropies beside that of the KL, all at once."""
    student, teacher, hidden, targets = problem()
    there = tops(teacher, hidden, targets, count)
    upstream, more, of_kl = torch.randn(3, ROWS)
    used = student if linear else nn.Sequential(student)
    ours = token_logprobs(used, hidden, targets, HEAT, "gradient", keep, cap, teacher=there)

    exact = copy.deepcopy(student).double()
    rows = hidden.detach().double().requires_grad_()
    logits = exact(rows) if cap is None else cap * torch.tanh(exact(rows) / cap)
    table = torch.log_softmax(logits / HEAT, -1)
    used_cells = slice(None, None if count < VOCABULARY else -1)
    p = cells(table, there.ids)[:, used_cells]
    q = there.logprobs[:, used_cells].double()
    kl = (p * (p.log() - q)).sum(-1)
    theirs = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1), kl
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)

    def loss(found: tuple[Tensor, ...]) -> Tensor:
        return (found[0] * upstream + found[1] * more + found[2] * of_kl).sum()

    gradients = torch.autograd.grad(loss(ours), [hidden, *student.parameters()])
    wanted = torch.autograd.grad(loss(theirs), [rows, *exact.parameters()])
    for got, expected in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("linear", [True, False])
def test_with_the_whole_vocabulary_it_is_the_reverse_kl(linear: bool) -> None:
    student, teacher, hidden, targets = problem()
    there = tops(teacher, hidden, targets, VOCABULARY)
    used = student if linear else nn.Sequential(student)
    ours = token_logprobs(used, hidden, targets, HEAT, "no", False, teacher=there)[2]
    own, other = table_of(student, hidden), table_of(teacher, hidden).detach()
    whole = F.kl_div(other, own, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
    for weight in (hidden, student.weight, student.bias):
        got, expected = (torch.autograd.grad(of.sum(), weight, retain_graph=True)[0] for of in (ours, whole))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_fewer_tokens_give_a_lower_bound_that_rises_with_them() -> None:
    student, teacher, hidden, targets = problem()
    own, other = table_of(student, hidden), table_of(teacher, hidden)
    whole = F.kl_div(other, own, reduction="none", log_target=True).sum(-1).detach()
    lower = torch.zeros(ROWS)
    for count in (1, 2, 5, 20, 100, VOCABULARY):
        there = tops(teacher, hidden, targets, count)
        kl = token_logprobs(student, hidden, targets, HEAT, "no", False, teacher=there)[2].detach()
        assert (kl >= lower - 1e-4).all() and (kl <= whole + 1e-4).all(), count
        lower = kl
    one = tops(teacher, hidden, targets, 1)
    kl = token_logprobs(student, hidden, targets, HEAT, "no", False, teacher=one)[2]
    assert (kl < whole - 0.01).any(), "one token does not say all"


@pytest.mark.parametrize("count", [1, 5, 300])
def test_a_student_that_equals_its_teacher_has_no_kl_and_no_gradient(count: int) -> None:
    student, _, hidden, targets = problem()
    there = tops(student, hidden, targets, count)
    kl = token_logprobs(student, hidden, targets, HEAT, "no", False, teacher=there)[2]
    assert kl.abs().max() < 1e-5
    for gradient in torch.autograd.grad(kl.sum(), [hidden, *student.parameters()]):
        assert gradient.abs().max() < 1e-4


def test_in_bf16_an_improbable_target_gets_its_own_gradient() -> None:
    """The target has hardly any probability and its student is far from the teacher: the gradient of the
    target's logit is nearly 0, not the rounding error of what other tokens get."""
    student = nn.Linear(4, 50, bias=True, dtype=torch.bfloat16)
    nn.init.zeros_(student.weight)
    nn.init.zeros_(student.bias)
    student.bias.data[0] = -30.0
    teacher = TopTokens(torch.tensor([[1, 2]]), torch.tensor([[0.49, 0.49, 0.02]]).log())
    hidden = torch.zeros(1, 4, dtype=torch.bfloat16)
    kl = token_logprobs(student, hidden, torch.tensor([0]), 1.0, "no", True, teacher=teacher)[2]
    (gradient,) = torch.autograd.grad(kl.sum(), [student.bias])
    assert gradient[0].abs() < 1e-9
    assert gradient[1] < -0.01 and gradient[3] > 0


def test_known_rows_and_no_rows() -> None:
    student, teacher, hidden, targets = problem()
    targets = targets % 200
    there = tops(teacher, hidden, targets, 300, known=200)
    assert there.ids.shape == (ROWS, 200) and int(there.ids.max()) < 200
    kl = token_logprobs(student, hidden, targets, HEAT, "no", False, known=200, teacher=there)[2]
    own, other = (torch.log_softmax(head(hidden)[:, :200] / HEAT, -1) for head in (student, teacher))
    whole = F.kl_div(other, own, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl, whole, rtol=1e-4, atol=1e-5)
    empty = tops(teacher, hidden[:0], targets[:0], 5)
    found = token_logprobs(student, hidden[:0], targets[:0], HEAT, "no", False, teacher=empty)
    assert [len(values) for values in found] == [0, 0, 0]
    found[2].sum().backward()


def test_a_teacher_whose_head_is_not_linear_is_refused() -> None:
    _, teacher, hidden, targets = problem()
    with pytest.raises(
        ValueError, match="teacher_top_k reads a linear head, and the teacher's is a Sequential"
    ):
        top_logprobs(nn.Sequential(teacher), hidden, targets, HEAT, 5)
