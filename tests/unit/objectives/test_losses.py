"""Losses against loops and hand-computed numbers. Equality under splits and layouts is in
`test_loss_splits.py`."""

import inspect
import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_core.objectives import losses
from tests.support import reference

B = 4
T = 9
N = 7


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def randoms(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(shape, generator=generator, dtype=torch.float64)


def holes(seed, *shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1000)) < 0.6
    mask.flatten()[:3] = torch.tensor([True, False, True])
    return mask


def assert_same(got: losses.Loss, expected: dict[str, float]):
    assert list(got.metrics) == list(expected)
    for name, metric in got.metrics.items():
        assert_close(metric.double(), tensor(expected[name]), msg=lambda text, name=name: f"{name}: {text}")
        assert not metric.requires_grad
    assert_close(got.loss.detach().double(), tensor(next(iter(expected.values()))))


def lists(*tensors):
    return [x.flatten().tolist() for x in tensors]


# Against the loops. Denominators are no counts of these batches on purpose: a loss must not count for itself.

seeds = pytest.mark.parametrize("seed", range(3))


@seeds
def test_sft_loss(seed):
    x = next(randoms(seed, B, T))
    mask = holes(seed, B, T)
    assert_same(losses.sft_loss(x, mask, 37), reference.sft_loss(*lists(x, mask), 37))


@seeds
@pytest.mark.parametrize("centering", [0.0, 0.01])
def test_reward_loss(seed, centering):
    draw = randoms(seed, N)
    chosen = next(draw)
    rejected = next(draw)
    margin = next(draw).abs()
    expected = reference.reward_loss(*lists(chosen, rejected, margin), centering, 5)
    assert_same(losses.reward_loss(chosen, rejected, margin, centering, 5), expected)
    expected = reference.reward_loss(*lists(chosen, rejected), [0.5] * N, centering, 5)
    assert_same(losses.reward_loss(chosen, rejected, 0.5, centering, 5), expected)


@seeds
@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_loss(seed, loss, smoothing):
    draw = randoms(seed, N)
    pc, pr, rc, rr = (5 * next(draw) for _ in range(4))
    expected = reference.dpo_loss(*lists(pc, pr, rc, rr), 0.3, smoothing, loss, 5)
    assert_same(losses.dpo_loss(pc, pr, rc, rr, 0.3, smoothing, loss, 5), expected)


def test_ipo_refuses_label_smoothing():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="label_smoothing"):
        losses.dpo_loss(x, x, x, x, 0.1, 0.1, "ipo", 2)


@seeds
def test_simpo_and_orpo_loss(seed):
    draw = randoms(seed, N)
    chosen = -next(draw).abs() - 0.01
    rejected = -next(draw).abs() - 0.01
    assert_same(
        losses.simpo_loss(chosen, rejected, 2.0, 1.0, 5),
        reference.simpo_loss(*lists(chosen, rejected), 2.0, 1.0, 5),
    )
    assert_same(
        losses.orpo_loss(chosen, rejected, 0.1, 5), reference.orpo_loss(*lists(chosen, rejected), 0.1, 5)
    )


def test_orpo_is_finite_for_a_certain_policy_in_fp32():
    certain = torch.zeros(2, requires_grad=True)
    loss = losses.orpo_loss(certain, certain - 3, 0.1, 2).loss
    loss.backward()
    assert loss.isfinite() and certain.grad is not None and certain.grad.isfinite().all()


@seeds
@pytest.mark.parametrize("kl", [0.7, -0.7])
def test_kto_loss(seed, kl):
    draw = randoms(seed, N)
    policy = 3 * next(draw)
    ref = 3 * next(draw)
    desirable = holes(seed, N)
    expected = reference.kto_loss(*lists(policy, ref, desirable), kl, 0.3, 1.1, 1.3, 5)
    assert_same(losses.kto_loss(policy, ref, desirable, kl, 0.3, 1.1, 1.3, 5), expected)
    assert_same(losses.kto_loss(policy, ref, desirable, tensor(kl), 0.3, 1.1, 1.3, 5), expected)


def test_kto_sends_no_gradient_through_the_kl():
    policy = torch.tensor([1.0, 2.0], requires_grad=True)
    ref = torch.zeros(2)
    desirable = torch.tensor([True, False])
    through = losses.kto_loss(policy, ref, desirable, policy.mean(), 0.1, 1.0, 2.0, 2).loss
    constant = losses.kto_loss(policy, ref, desirable, 1.5, 0.1, 1.0, 2.0, 2).loss
    assert_close(*torch.autograd.grad(through, policy), *torch.autograd.grad(constant, policy))


@seeds
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_loss(seed, dual_clip, weighted):
    draw = randoms(seed, B, T)
    mask = holes(seed, B, T)
    new = 0.5 * next(draw)
    old = 0.5 * next(draw)
    advantages = next(draw)
    is_weights = next(draw).exp()
    weights = next(draw).exp()
    flat_weights = weights.flatten().tolist() if weighted else [1.0] * (B * T)
    expected = reference.policy_loss(
        *lists(new, old, advantages, mask), 0.2, 0.3, *lists(is_weights), 37, dual_clip, flat_weights
    )
    got = losses.policy_loss(
        new, old, advantages, mask, 0.2, 0.3, is_weights, 37, dual_clip, weights if weighted else None
    )
    assert 0 < expected["policy/clip_share"] < sum(flat_weights) / 37
    moved = losses.kl_from_old(new, old, mask, 37, weights if weighted else None)
    assert_same(got._replace(metrics=got.metrics | {"policy/kl_old": moved}), expected)


@seeds
def test_gspo_uses_the_geometric_mean_of_an_answers_ratios(seed):
    draw = randoms(seed, B, T)
    mask = holes(seed, B, T)
    new = next(draw)
    old = next(draw)
    documents = torch.tensor([[2, 2, 2, 2, 0, 0, 0, 0, -1], [1] * 9, [3] * 5 + [-1] * 4, [4] * 9])
    mask &= documents >= 0
    log_ratio = losses.gspo_logprobs(new, old, mask, documents, 5) - torch.where(mask, old, 0)
    expected = tensor(reference.gspo_ratios(*lists(new, old, mask, documents), 5))
    assert_close(log_ratio.exp()[mask], expected[documents[mask]])


def test_a_sequence_ratio_leaves_the_credit_inside_an_answer():
    """Advantages 3, 0, -3 within an answer: their mean is 0, and each token still has its own gradient
    (GSPO-token)."""
    old = torch.zeros(1, 3).double()
    mask = torch.ones(1, 3, dtype=torch.bool)
    documents = torch.zeros(1, 3, dtype=torch.int64)
    new = torch.zeros(1, 3).double().requires_grad_()
    ones = torch.ones(1, 3).double()

    def gradient(advantages):
        ratio = losses.gspo_logprobs(new, old, mask, documents, 1)
        loss = losses.policy_loss(
            ratio, old, tensor([advantages]), mask, 0.2, 0.2, ones, 1, weights=ones / 3
        ).loss
        return torch.autograd.grad(loss, new)[0]

    assert_close(gradient([3.0, 0.0, -3.0]), tensor([[-1.0, 0.0, 1.0]]))
    assert_close(gradient([3.0, 3.0, 3.0]), tensor([[-1.0, -1.0, -1.0]]))  # one advantage: that of GSPO


@seeds
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss(seed, estimator):
    draw = randoms(seed, B, T)
    mask = holes(seed, B, T)
    new = next(draw)
    old = next(draw)
    ref = next(draw)
    is_weights = next(draw).exp()
    expected = reference.kl_loss(*lists(new, old, ref, mask, is_weights), estimator, 37)
    assert_same(losses.kl_loss(new, old, ref, mask, is_weights, estimator, 37), expected)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_the_kl_loss_is_that_of_the_reverse_kl(estimator):
    """In expectation over one token of five, that older weights in another precision sampled: summed over all
    five."""
    draw = randoms(11, 1, 5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    logits = next(draw).requires_grad_()
    old, sampler, ref = (next(draw).log_softmax(-1) for _ in range(3))
    policy = logits.log_softmax(-1)
    loss = losses.kl_loss(policy, old, ref, mask, (old - sampler).exp(), estimator, 1, sampler.exp()).loss
    reverse_kl = (policy.exp() * (policy - ref)).sum()
    of_loss = torch.autograd.grad(loss, logits, retain_graph=True)
    assert_close(of_loss, torch.autograd.grad(reverse_kl, logits))


@seeds
def test_kl_and_entropy_with_weights_are_weighed_sums(seed):
    draw = randoms(seed, B, T)
    mask = holes(seed, B, T)
    new = next(draw)
    ref = next(draw)
    weights = next(draw).exp()
    entropy = next(draw).abs()
    expected = (
        sum(
            (w * reference.kl(p, q, "k3"))
            for p, q, w, m in zip(*lists(new, ref, weights, mask), strict=True)
            if m
        )
        / 37
    )
    on_policy = losses.kl_loss(new, new, ref, mask, torch.ones_like(new), "k3", 37, weights)
    assert_same(on_policy, {"policy/kl_loss": expected})
    for scale in (None, weights):
        loss, metrics = losses.entropy_loss(entropy, mask, 37, scale)
        pairs = zip(*lists(entropy, torch.ones_like(entropy) if scale is None else scale, mask), strict=True)
        expected = sum(w * h for h, w, m in pairs if m) / 37
        assert_close(metrics["policy/entropy"], tensor(expected))
        assert_close(loss, tensor(-expected))


def test_k1_is_refused_as_a_loss():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="k1"):
        losses.kl_loss(x, x, x, x == 0, x, "k1", 2)


# By hand.


def test_policy_loss_by_hand():
    ratios = tensor([[1.5, 0.5, 0.5, 2.0, 7.0]])
    advantages = tensor([[2.0, -1.0, 1.0, -1.0, 9.0]])
    is_weights = tensor([[1.0, 1.0, 1.0, 0.5, 9.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    logprobs = ratios.log().requires_grad_()
    # clip 0.2 and 0.2; objectives min(rho A, clip(rho) A):
    #   min(1.5 * 2, 1.2 * 2)   = min(3, 2.4)      = 2.4   clipped
    #   min(0.5 * -1, 0.8 * -1) = min(-0.5, -0.8)  = -0.8  clipped
    #   min(0.5 * 1, 0.8 * 1)   = min(0.5, 0.8)    = 0.5
    #   min(2 * -1, 1.2 * -1)   = min(-2, -1.2)    = -2,   times weight 0.5 = -1
    # sum 1.1, loss -1.1 / 4
    got = losses.policy_loss(logprobs, torch.zeros(1, 5).double(), advantages, mask, 0.2, 0.2, is_weights, 4)
    assert_close(got.loss, tensor(-0.275))
    assert_close(got.metrics["policy/clip_share"].double(), tensor(0.5))
    assert_close(got.metrics["policy/ratio"], tensor(1.125))  # (1.5 + 0.5 + 0.5 + 2) / 4
    # rho - 1 - ln rho: 0.5 - 0.4054651081 = 0.0945348919; twice -0.5 + 0.6931471806 = 0.1931471806; 1 -
    # 0.6931471806 = 0.3068528194
    moved = losses.kl_from_old(logprobs, torch.zeros(1, 5).double(), mask, 4)
    assert_close(moved, tensor(0.7876820725 / 4))
    assert not moved.requires_grad
    # d/dlogprob = -w rho A / 4 where nothing is clipped: -0.5 / 4 and 0.5 * 2 / 4
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert_close(grad, tensor([[0.0, 0.0, -0.125, 0.25, 0.0]]))
    # dual clip 1.5: the fourth is max(-2, -1.5) = -1.5, times 0.5 = -0.75; sum 1.35, and its gradient is cut
    dual = losses.policy_loss(
        logprobs, torch.zeros(1, 5).double(), advantages, mask, 0.2, 0.2, is_weights, 4, dual_clip=1.5
    )
    assert_close(dual.loss, tensor(-0.3375))
    assert_close(dual.metrics["policy/clip_share"].double(), tensor(0.75))
    (grad,) = torch.autograd.grad(dual.loss, logprobs)
    assert_close(grad, tensor([[0.0, 0.0, -0.125, 0.0, 0.0]]))


def test_clip_higher_lets_good_tokens_rise_further():
    logprobs = tensor([[1.25, 0.75]]).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    ones = torch.ones(1, 2).double()
    # low 0.2, high 0.28, A = 1 then -1: 1.25 stays, 0.75 is lifted to 0.8: -(1.25 - 0.8) / 2
    got = losses.policy_loss(logprobs, 0 * logprobs, tensor([[1.0, -1.0]]), mask, 0.2, 0.28, ones, 2)
    assert_close(got.loss, tensor(-0.225))
    assert_close(got.metrics["policy/clip_share"].double(), tensor(0.5))


def test_at_the_first_step_the_policy_gradient_is_that_of_reinforce():
    logprobs = next(randoms(0, B, T)).requires_grad_()
    advantages = next(randoms(1, B, T))
    mask = holes(0, B, T)
    got = losses.policy_loss(
        logprobs, logprobs.detach(), advantages, mask, 0.2, 0.2, torch.ones(B, T).double(), 10
    )
    assert_close(got.metrics["policy/ratio"], mask.sum().double() / 10)
    assert losses.kl_from_old(logprobs, logprobs, mask, 10) == got.metrics["policy/clip_share"] == 0
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert_close(grad, torch.where(mask, -advantages / 10, 0))


# What every loss shares.


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_garbage_off_the_mask_reaches_neither_loss_nor_gradient(garbage):
    draw = randoms(3, B, T)
    mask = holes(3, B, T)
    clean = [next(draw) for _ in range(4)]
    dirty = [torch.where(mask, x, garbage) for x in clean]
    documents = torch.arange(B)[:, None].expand(B, T)

    def run(new, old, advantages, weights):
        new = new.clone().requires_grad_()
        terms = [
            losses.sft_loss(new, mask, 9),
            losses.policy_loss(new, old, advantages, mask, 0.2, 0.2, weights, 9, 1.5, weights),
            losses.policy_loss(
                losses.gspo_logprobs(new, old, mask, documents, B),
                old,
                advantages,
                mask,
                0.2,
                0.2,
                weights,
                9,
            ),
            losses.kl_loss(new, old, advantages, mask, weights, "k2", 9),
            losses.kl_loss(new, old, advantages, mask, weights, "k3", 9, weights),
            losses.entropy_loss(new, mask, 9, weights),
            losses.value_loss(new, old, advantages, mask, 0.2, 9),
        ]
        return [(loss, *torch.autograd.grad(loss, new)) for loss, _ in terms]

    assert_close(run(*dirty), run(*clean))


@pytest.mark.parametrize("denominator", [0, -1, float("nan")])
def test_an_empty_optimiser_step_is_refused(denominator):
    with pytest.raises(ValueError, match="denominator"):
        losses.sft_loss(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), denominator)


def test_every_loss_takes_the_global_denominator():
    named = {
        name: function
        for name, function in inspect.getmembers(losses, inspect.isfunction)
        if name.endswith("_loss")
    }
    named.pop("_loss")
    assert len(named) == 12
    for name, function in named.items():
        assert "denominator" in inspect.signature(function).parameters, name


def test_cispo_weighs_the_log_probs_by_clipped_ratios():
    ratios = tensor([[1.5, 0.5, 1.0, 9.0]])
    advantages = tensor([[2.0, -1.0, 1.0, 7.0]])
    mask = torch.tensor([[True, True, True, False]])
    logprobs = ratios.log().requires_grad_()
    got = losses.policy_loss(
        logprobs,
        torch.zeros(1, 4).double(),
        advantages,
        mask,
        0.2,
        0.2,
        torch.ones(1, 4).double(),
        3,
        cispo=True,
    )
    # -(1.2 * 2 * ln 1.5 + 0.8 * -1 * ln 0.5 + 1 * 1 * ln 1) / 3
    assert_close(got.loss, tensor(-(2.4 * math.log(1.5) - 0.8 * math.log(0.5)) / 3))
    assert_close(got.metrics["policy/clip_share"].double(), tensor(2 / 3))
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert_close(grad, tensor([[-2.4 / 3, 0.8 / 3, -1 / 3, 0.0]]))  # clipped tokens have one, too
