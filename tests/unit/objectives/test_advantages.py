"""KL, token rewards, GAE, group estimators and controllers against loops and hand-computed numbers, on masks
with holes."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from rlhf_core.objectives import advantages as adv
from rlhf_core.objectives.kl_controller import KLController
from rlhf_core.objectives.masked import whiten
from tests.support import reference

B = 5
T = 11


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture(params=range(3))
def rollout(request):
    """kl, rewards, values (B, T), scores (B,), and a mask with holes, whose last row has no response at
    all."""
    generator = torch.Generator().manual_seed(request.param)
    kl, rewards, values = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
    scores = torch.randn(B, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) < 0.6
    # prompt, hole, padding
    mask[0] = torch.tensor([False] * 3 + [True] * 3 + [False] * 2 + [True] * 2 + [False])
    mask[-1] = False
    return kl, rewards, values, scores, mask


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_the_formula(rollout, estimator):
    p = rollout[0]
    q = rollout[1]
    expected = [
        [reference.kl(a, b, estimator) for a, b in zip(*rows, strict=True)]
        for rows in zip(p.tolist(), q.tolist(), strict=True)
    ]
    assert_close(adv.kl_estimate(p, q, estimator), tensor(expected))


def test_k1_and_k3_estimate_the_kl_without_bias_and_k2_is_close_when_the_policies_are():
    p = tensor([0.5, 0.3, 0.2])
    q = tensor([0.4, 0.35, 0.25])
    true = (p * (p / q).log()).sum()
    # exact expectations
    k1, k2, k3 = (
        (p * adv.kl_estimate(p.log(), q.log(), estimator)).sum() for estimator in ("k1", "k2", "k3")
    )
    assert_close(k1, true)
    assert_close(k3, true)
    assert 0 < abs(k2 - true) < 0.05 * true


def test_token_rewards_equal_the_loop(rollout):
    kl, _, _, scores, mask = rollout
    rewards = adv.token_rewards(kl, 0.1, scores, mask)
    rows = zip(kl.tolist(), scores.tolist(), mask.tolist(), strict=True)
    assert_close(rewards, tensor([reference.token_rewards(k, 0.1, score, m) for k, score, m in rows]))
    assert rewards[-1].abs().max() == 0  # no response token, nothing earned


def test_gae_equals_the_sum_of_deltas_over_response_tokens(rollout):
    _, rewards, values, _, mask = rollout
    for gamma, lambd in ((1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (1.0, 0.0)):
        credit = adv.gae(rewards, values, mask, gamma, lambd)
        rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
        expected = [reference.gae(r, v, m, gamma, lambd) for r, v, m in rows]
        assert_close(credit.advantages, tensor([a for a, _ in expected]))
        assert_close(credit.returns, tensor([g for _, g in expected]))


def test_a_value_after_the_last_token_is_one_more_step(rollout):
    """Of rows whose last response tokens are at different places, one of them without any."""
    _, rewards, values, after, mask = rollout
    for gamma, lambd in ((1.0, 0.95), (0.9, 0.7), (0.0, 1.0)):
        credit = adv.gae(rewards, values, mask, gamma, lambd, after)
        rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), after.tolist(), strict=True)
        expected = [reference.gae(r, v, m, gamma, lambd, a) for r, v, m, a in rows]
        assert_close(credit.advantages, tensor([a for a, _ in expected]))
        assert_close(credit.returns, tensor([g for _, g in expected]))


def test_gae_by_hand():
    mask = torch.tensor([False, True, False, True, True])
    rewards = torch.tensor([9.0, 0.0, 9.0, 0.0, 1.0])
    values = torch.tensor([9.0, 0.5, 9.0, 0.25, 0.5])
    # gamma = lambda = 0.5; the tokens that count are 1, 3, 4
    # t=4: delta = 1 - 0.5 = 0.5                     A = 0.5
    # t=3: delta = 0 + 0.5 * 0.5 - 0.25 = 0          A = 0 + 0.25 * 0.5 = 0.125
    # t=1: delta = 0 + 0.5 * 0.25 - 0.5 = -0.375     A = -0.375 + 0.25 * 0.125 = -0.34375
    credit = adv.gae(rewards, values, mask, 0.5, 0.5)
    assert credit.advantages.tolist() == [0, -0.34375, 0, 0.125, 0.5]
    assert credit.returns.tolist() == [0, 0.15625, 0, 0.375, 1.0]  # + values


def test_masked_tokens_are_skipped_not_zeroed(rollout):
    """Cutting the masked tokens out changes nothing, and garbage on them changes nothing; a ragged row equals
    a padded one."""
    _, rewards, values, _, mask = rollout
    nan = torch.full_like(values, float("nan"))
    whole = adv.gae(torch.where(mask, rewards, nan), torch.where(mask, values, nan), mask, 0.9, 0.8)
    for b in range(B):
        cut = mask[b].nonzero().flatten()
        if len(cut) == 0:
            assert whole.advantages[b].abs().max() == 0
            continue
        dense = adv.gae(rewards[b, cut], values[b, cut], torch.ones(len(cut), dtype=torch.bool), 0.9, 0.8)
        assert_close(whole.advantages[b, cut], dense.advantages)
        assert_close(whole.returns[b, cut], dense.returns)
        assert whole.advantages[b][~mask[b]].abs().sum() == 0


def test_with_gamma_and_lambda_1_returns_are_the_rewards_to_go(rollout):
    _, rewards, values, _, mask = rollout
    to_go = torch.where(mask, rewards, 0).flip(-1).cumsum(-1).flip(-1)
    assert_close(adv.gae(rewards, values, mask, 1.0, 1.0).returns, torch.where(mask, to_go, 0))


def test_explained_variance(rollout):
    _, returns, values, _, mask = rollout
    expected = reference.explained_variance(
        values.flatten().tolist(), returns.flatten().tolist(), mask.flatten().tolist()
    )
    assert_close(adv.explained_variance(values, returns, mask), tensor(expected))
    assert_close(adv.explained_variance(returns, returns, mask), tensor(1.0))
    assert_close(adv.explained_variance(torch.full_like(values, 7.0), returns, mask), tensor(0.0))


def test_group_estimators_equal_the_loops(rollout):
    scores = rollout[1]
    assert_close(adv.grpo(scores, 1e-4), tensor([reference.grpo(group, 1e-4) for group in scores.tolist()]))
    assert_close(adv.dr_grpo(scores), tensor([reference.dr_grpo(group) for group in scores.tolist()]))
    assert_close(adv.rloo(scores), tensor([reference.rloo(group) for group in scores.tolist()]))


def test_group_estimators_give_no_signal_to_a_group_of_equals_and_refuse_one_answer():
    for estimator in (adv.grpo, adv.dr_grpo, adv.rloo):
        assert estimator(torch.full((2, 4), 3.0)).abs().max() == 0
        with pytest.raises(ValueError, match="n_samples_per_prompt"):
            estimator(torch.ones(2, 1))


def test_reinforce_pp_equals_the_loop_and_its_baseline_takes_the_group_mean_off_first(rollout):
    kl, draws, _, _, mask = rollout
    kl = torch.stack([kl, -kl], 1)
    mask = torch.stack([mask, mask.roll(1, 0)], 1)  # G=B groups of n=2: (G, n, T)
    scores = 3 * draws[:, :2]
    for baseline in (False, True):
        rows = []
        costs = []
        for g in range(B):
            group = scores[g].tolist()
            centred = reference.dr_grpo(group) if baseline else group
            for i in range(2):
                rewards = reference.token_rewards(kl[g, i].tolist(), 0.0, centred[i], mask[g, i].tolist())
                rows += reference.discounted_returns(rewards, mask[g, i].tolist(), 0.9)
                costs += reference.discounted_returns((0.1 * kl[g, i]).tolist(), mask[g, i].tolist(), 0.9)
        flat = mask.flatten().tolist()
        mean = sum(cost for cost, counts in zip(costs, flat, strict=True) if counts) / sum(flat)
        white = reference.whiten(rows, flat, 1e-8)
        expected = [
            w - (c - mean) if counts else 0.0 for w, c, counts in zip(white, costs, flat, strict=True)
        ]
        task = adv.token_rewards(kl, 0.0, adv.dr_grpo(scores) if baseline else scores, mask)
        assert_close(adv.reinforce_pp(task, 0.1 * kl, mask, 0.9).flatten(), tensor(expected))


@pytest.mark.parametrize(("reward", "n"), [(9.7, 10), (3.3, 7), (97.3, 8), (700.1, 8), (0.1, 1000)])
def test_equal_rewards_give_no_advantage_at_all(reward, n):
    """In float32 their mean may be off by an ulp, which a deviation of almost 0 would make an advantage of up
    to 0.4."""
    scores = torch.full((n,), reward, dtype=torch.float32)
    for estimator in adv.GROUPED.values():
        assert (
            adv.in_groups(estimator, scores, torch.ones(n, dtype=torch.bool), n).advantages.abs().max() < 1e-9
        )
    assert whiten(scores, torch.ones(n, dtype=torch.bool)).abs().max() == 0


def test_rewards_are_normalised_with_stored_statistics_then_clipped():
    scores = torch.tensor([-50.0, 1.0, 4.0])
    normal = adv.normalize_rewards(scores, mean=1.0, std=1.5)
    assert normal.tolist() == [-34.0, 0.0, 2.0]
    for std in (0.0, float("nan")):
        with pytest.raises(ValueError, match="std"):
            adv.normalize_rewards(scores, 1.0, std)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25])
def test_whitened_numbers_have_no_scale(scale):
    """The squares of 1e25 are beyond float32."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]) * scale
    white = whiten(x, torch.ones(4, dtype=torch.bool))
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5]) / 1.25**0.5
    assert torch.allclose(white, expected, rtol=0.01)


def test_whitening_comes_after_returns(rollout):
    _, rewards, values, _, mask = rollout
    credit = adv.gae(rewards, values, mask, 1.0, 0.95)
    before = credit.returns.clone()
    white = whiten(credit.advantages, mask)
    assert_close(credit.returns, before)
    assert_close(credit.advantages + values * mask, credit.returns)
    assert not torch.allclose(white + values * mask, credit.returns)


def test_adaptive_kl_by_hand():
    controller = KLController(0.1, target=6.0, horizon=10000)
    # kl 12: error 12/6 - 1 = 1, clipped to 0.2; 0.1 * (1 + 0.2 / 10000)^512, ln = 512 * 1.99998e-5 =
    # 0.0102399
    up = controller.update(12.0, 512)
    assert up.coef == pytest.approx(0.1 * math.exp(0.0102399))
    # kl 6.6: error 0.1; times (1 + 0.1 / 10000)^1000, ln = 1000 * 9.99995e-6
    assert up.update(6.6, 1000).coef == pytest.approx(up.coef * math.exp(0.00999995))
    # kl 0: error -1, clipped to -0.2
    assert controller.update(0.0, 512).coef == pytest.approx(0.1 * math.exp(-0.0102401))
    assert controller.coef == 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        controller.coef = 1.0


@pytest.mark.parametrize("kl", [0.0, 100.0, -1.0])
def test_the_adaptive_coefficient_stays_positive_and_does_not_depend_on_the_batch(kl):
    at_once = KLController(0.1, target=0.01).update(kl, 40_960)
    parts = KLController(0.1, target=0.01)
    for _ in range(640):
        parts = parts.update(kl, 64)
    assert parts.coef == pytest.approx(at_once.coef, rel=1e-9)
    for horizon, answers in ((10_000, 65_536), (10, 65_536)):
        factor = KLController(0.1, target=0.01, horizon=horizon).update(kl, answers).coef / 0.1
        assert math.exp(-1) * 0.999 < factor < math.exp(1) * 1.001


def test_without_a_target_the_coefficient_stays():
    assert KLController(0.1).update(12.0, 512) == KLController(0.1)
