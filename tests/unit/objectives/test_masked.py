"""Masked and per-document reductions against loops, on packed rows whose masks have holes; garbage off the
mask has no effect."""

import pytest
import torch
from torch.testing import assert_close

from rlhf_core.objectives import masked
from tests.support import reference

# Two packed rows with padding: documents 2 and 0, then 1 and 3. Document 3 has one token.
DOCUMENTS = torch.tensor([[2, 2, 2, 0, 0, 0, 0, -1], [1, 1, 1, 1, 1, 3, -1, -1]])
N = 4


@pytest.fixture(params=range(3))
def x_and_mask(request):
    generator = torch.Generator().manual_seed(request.param)
    x = torch.randn(DOCUMENTS.shape, generator=generator, dtype=torch.float64)
    mask = (torch.rand(DOCUMENTS.shape, generator=generator) < 0.6) & (DOCUMENTS >= 0)
    mask[0, 3:7] = torch.tensor([False, True, False, True])  # a hole for certain
    return x, mask


def flat(*tensors):
    return [tensor.flatten().tolist() for tensor in tensors]


def positions_of(documents):
    """Of each token in its document; 0 on padding."""
    row = torch.arange(documents.shape[1])
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
    return row - torch.where(starts, row, 0).cummax(1).values


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_sums_and_means_equal_the_loops(x_and_mask):
    x, mask = x_and_mask
    assert_close(masked.masked_sum(x, mask), tensor(reference.masked_sum(*flat(x, mask))))
    assert_close(masked.masked_mean(x, mask), tensor(reference.masked_mean(*flat(x, mask))))
    assert_close(
        masked.document_sum(x, mask, DOCUMENTS, N),
        tensor(reference.document_sum(*flat(x, mask, DOCUMENTS), N)),
    )
    assert_close(
        masked.document_mean(x, mask, DOCUMENTS, N),
        tensor(reference.document_mean(*flat(x, mask, DOCUMENTS), N)),
    )
    assert_close(masked.gather_last(x, DOCUMENTS, N), tensor(reference.gather_last(*flat(x, DOCUMENTS), N)))
    assert_close(
        masked.before(x, positions_of(DOCUMENTS)),
        tensor(reference.shift_right(x.tolist(), DOCUMENTS.tolist())),
    )


@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_whiten_equals_the_loop_and_has_mean_0_and_variance_1(x_and_mask, eps):
    x, mask = x_and_mask
    white = masked.whiten(x, mask, eps)
    assert_close(white.flatten(), tensor(reference.whiten(*flat(x, mask), eps)))
    assert white[~mask].abs().max() == 0
    if eps == 1e-8:
        assert_close(white[mask].mean(), tensor(0.0))
        assert_close(white[mask].var(unbiased=False), tensor(1.0))


def test_whiten_weighs_tokens_not_rows():
    x = torch.tensor([[3.0, 3.0, 3.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    # token mean (9 - 1) / 4 = 2, variance (3 * 1 + 9) / 4 = 3
    assert_close(masked.whiten(x, mask), torch.tensor([[1.0, 1.0, 1.0], [-3.0, 0.0, 0.0]]) / 3**0.5)


def test_garbage_off_the_mask_reaches_neither_value_nor_gradient(x_and_mask):
    x, mask = x_and_mask
    for garbage in (float("nan"), float("inf")):
        dirty = torch.where(mask, x, garbage).requires_grad_()
        clean = x.clone().requires_grad_()
        for reduce in (
            lambda z: masked.masked_sum(z, mask),
            lambda z: masked.masked_mean(z, mask),
            lambda z: masked.document_sum(z, mask, DOCUMENTS, N).square().sum(),
            lambda z: masked.document_mean(z, mask, DOCUMENTS, N).square().sum(),
        ):
            assert_close(reduce(dirty), reduce(clean))
            assert_close(
                *torch.autograd.grad(reduce(dirty), dirty), *torch.autograd.grad(reduce(clean), clean)
            )
        assert_close(masked.whiten(dirty, mask), masked.whiten(clean, mask))


def test_an_empty_mask_gives_zero():
    x = torch.randn(2, 8)
    nothing = torch.zeros(2, 8, dtype=torch.bool)
    assert masked.masked_sum(x, nothing) == masked.masked_mean(x, nothing) == 0
    assert masked.document_mean(x, nothing, DOCUMENTS, N).tolist() == [0, 0, 0, 0]
    assert masked.whiten(x, nothing).abs().max() == 0


def test_padding_never_counts_even_when_the_mask_says_so():
    everything = torch.ones_like(DOCUMENTS, dtype=torch.bool)
    assert masked.document_sum(torch.ones(2, 8), everything, DOCUMENTS, N).tolist() == [4, 5, 3, 1]


def test_last_token_index_reads_the_flattened_batch_and_refuses_a_document_without_tokens():
    assert masked.last_token_index(DOCUMENTS, N).tolist() == [6, 12, 2, 13]
    with pytest.raises(ValueError, match=r"documents \[4\] of 5 have no token"):
        masked.last_token_index(DOCUMENTS, 5)


def test_outputs_move_by_one_within_a_document_and_the_gradient_goes_back():
    h = torch.arange(1.0, 17.0).view(2, 8).requires_grad_()
    x = masked.before(h, positions_of(DOCUMENTS))
    assert x.tolist() == [[0, 1, 2, 0, 4, 5, 6, 0], [0, 9, 10, 11, 12, 0, 0, 0]]
    (grad,) = torch.autograd.grad(x.sum(), h)
    # last tokens and padding speak of nothing
    assert grad.tolist() == [[1, 1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
