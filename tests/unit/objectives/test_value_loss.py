"""The value loss by loops and by hand, and how far values may move."""

import pytest
import torch
from torch.testing import assert_close

from rlhf_core.objectives import losses
from tests.support import reference
from tests.unit.objectives.test_losses import B, T, assert_same, holes, lists, randoms, seeds, tensor


@seeds
def test_value_loss(seed):
    draw = randoms(seed, B, T)
    mask = holes(seed, B, T)
    values = next(draw)
    old = next(draw)
    returns = next(draw)
    expected = reference.value_loss(*lists(values, old, returns, mask), 0.2, 37)
    assert expected["value/clip_share"] > 0
    assert_same(losses.value_loss(values, old, returns, mask, 0.2, 37), expected)


def test_value_loss_by_hand():
    values = tensor([[1.0, 1.0, 0.6, 5.0]]).requires_grad_()
    old_values = tensor([[0.5, 0.5, 0.5, 5.0]])
    returns = tensor([[0.0, 1.2, 1.0, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    # clip 0.2, V clipped to 0.7, 0.7, 0.6:
    #   max((1 - 0)^2, (0.7 - 0)^2)     = max(1, 0.49)    = 1
    #   max((1 - 1.2)^2, (0.7 - 1.2)^2) = max(0.04, 0.25) = 0.25  clipped
    #   max((0.6 - 1)^2, (0.6 - 1)^2)   = 0.16
    # 0.5 * 1.41 / 3 = 0.235
    got = losses.value_loss(values, old_values, returns, mask, 0.2, 3)
    assert_close(got.loss, tensor(0.235))
    # a share is fp32
    assert_close(got.metrics["value/clip_share"].double(), tensor(1 / 3), rtol=1.3e-6, atol=1e-5)
    # (V - R) / 3 where unclipped: 1 / 3 and -0.4 / 3
    (grad,) = torch.autograd.grad(got.loss, values)
    assert_close(grad, tensor([[1 / 3, 0.0, -0.4 / 3, 0.0]]))


def test_without_a_clip_values_move_as_far_as_they_like():
    values = tensor([[1.0, 1.0, 0.1 + 0.2, 5.0]]).requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    returns = tensor([[0.0, 1.2, 1.0, 9.0]])
    got = losses.value_loss(values, tensor([[0.5, 0.5, 0.7, 5.0]]), returns, mask, None, 3)
    assert_close(got.loss, tensor(0.5 * (1 + 0.04 + 0.49) / 3))
    assert got.metrics["value/clip_share"] == 0
    (grad,) = torch.autograd.grad(got.loss, values)
    assert_close(grad, tensor([[1 / 3, -0.2 / 3, -0.7 / 3, 0.0]]))


def test_the_range_of_values_follows_the_scale_of_the_returns():
    returns = tensor([[1.0, 3.0, 99.0], [5.0, 7.0, -99.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    std = 5**0.5  # of 1, 3, 5, 7
    for scale in (1e-20, 1.0, 1e18):
        assert losses.value_clip_range(
            returns.float() * scale, returns.float() * scale, mask, 0.2
        ) == pytest.approx(0.2 * std * scale)
    assert losses.value_clip_range(returns + 1000, returns + 1000, mask, 0.2) == pytest.approx(0.2 * std)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e30])
def test_returns_without_spread_leave_the_clip_as_it_is(value):
    mask = torch.rand(3, 5) < 2
    assert losses.value_clip_range(torch.full((3, 5), value), torch.full((3, 5), value), mask, 0.2) == 0.2
    noise = torch.full((3, 5), value) * (1 + 1e-7 * torch.randn(3, 5))
    assert losses.value_clip_range(noise, noise, mask, 0.2) == 0.2, "of rounding"
    assert losses.value_clip_range(noise, noise, ~mask, 0.2) == 0.2, "nothing is trained on"
