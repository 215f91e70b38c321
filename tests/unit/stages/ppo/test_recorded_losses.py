"""Weights and losses of actor and critic on the recorded rollout, against numbers computed by hand."""

from __future__ import annotations

import math

import torch

from rlhf_core.objectives.actor_loss import PerToken, ResponseCounts, actor_loss
from rlhf_core.objectives.losses import value_loss
from rlhf_core.objectives.sampler_weights import sampler_weights
from tests.support.recorded_rollout import (
    OLD,
    REFERENCE,
    SAMPLER,
    VALUES,
    arrays,
    close,
    credited,
    ppo,
)

STD = 0.5494**0.5  # of the advantages before whitening (test_credit.py)


def test_importance_weights_of_the_recorded_rollout() -> None:
    def weights(**changes: object) -> list[list[float]]:
        found = sampler_weights(
            layout(OLD), layout([row.tolist() for row in arrays(SAMPLER)]), MASK, DOCUMENTS, ppo(**changes)
        )
        return [found[0, 1:].tolist(), found[1, 1:3].tolist()]

    assert weights() == [close([1, 2, 1]), close([0.5, 1])]  # 4 is truncated to 2
    assert weights(sampler_is="clamp", sampler_is_clamp=(0.75, 5.0)) == [close([1, 4, 1]), close([0.75, 1])]
    assert weights(sampler_is="off") == [[1, 1, 1], [1, 1]]


def layout(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows])


DOCUMENTS = torch.tensor([[0, 0, 0, 0], [1, 1, 1, -1]])
MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])
RATIOS = [[1.0, 1.5, 1.0, 0.5], [1.0, 0.9, 1.25]]


def loss_of(kl_coef: float = 0.0, entropy: float = 0.0, **changes: object) -> tuple[float, dict[str, float]]:
    """The actor's loss when the policy has moved by RATIOS since the rollout."""
    found = credited()
    old = layout(OLD)
    x = PerToken(
        logprobs=old + layout(RATIOS).clamp(min=0.1).log(),
        entropy=torch.full((2, 4), entropy),
        old_logprobs=old,
        ref_logprobs=layout(REFERENCE),
        advantages=layout([e.advantages.tolist() for e in found.experience]),
        is_weights=sampler_weights(
            old, layout([e.sampler_logprobs.tolist() for e in found.experience]), MASK, DOCUMENTS, ppo()
        ),
        mask=MASK,
        documents=DOCUMENTS,
    )
    loss, metrics = actor_loss(x, 2, ResponseCounts(5, 2), ppo(generate_max_len=10, **changes), kl_coef)
    return float(loss), {name: float(value) for name, value in metrics.items()}


# Objectives w min(rho A, clip(rho) A), times STD: A: 1.2 * 0.69 = 0.828;  2 * 1.0 * 0.64 = 1.28;  0.5 * 0.44
# = 0.22;  B: 0.5 * 0.9 * -1.11 = -0.4995;  1.25 * -0.66 = -0.825
def test_policy_loss_of_the_recorded_rollout() -> None:
    loss, metrics = loss_of()
    assert loss == close(-1.0035 / STD / 5)
    assert metrics["policy/clip_share"] == close(0.2) and metrics["policy/ratio"] == close(5.15 / 5)


def test_policy_loss_by_aggregation() -> None:
    a = 0.828 + 1.28 + 0.22
    b = -0.4995 - 0.825
    loss, metrics = loss_of(loss_aggregation="sequence")
    assert loss == close(-(a / 3 + b / 2) / STD / 2)  # GRPO: the mean of each answer, then of the answers
    assert metrics["policy/ratio"] == close((3 / 3 + 2.15 / 2) / 2)
    loss, metrics = loss_of(loss_aggregation="constant")
    assert loss == close(-(a + b) / STD / (2 * 10))  # Dr. GRPO: two answers of a constant length of 10
    assert metrics["policy/ratio"] == close(5.15 / 5), "a ratio stays one of tokens"


def test_the_kl_from_the_old_policy_is_that_of_tokens_with_each_ratio() -> None:
    """Log-ratios of 0.5 and -0.5, whose mean over the answer is 0."""
    zeros = torch.zeros(1, 4)
    gaps = torch.tensor([[0.5, -0.5, 0.5, -0.5]])
    inside = torch.ones(1, 4, dtype=torch.bool)
    x = PerToken(gaps, zeros, zeros, None, zeros, zeros + 1, inside, torch.zeros(1, 4, dtype=torch.long))
    for ratio in ("token", "sequence"):
        found = actor_loss(x, 1, ResponseCounts(4, 1), ppo(ratio=ratio, init_kl_coef=0.0), 0.0).metrics
        assert float(found["policy/kl_old"]) == close(math.cosh(0.5) - 1), ratio
        assert float(found["policy/ratio"]) == close(math.cosh(0.5) if ratio == "token" else 1.0)


def test_clip_higher_and_dual_clip_reach_the_loss() -> None:
    # clip_high 0.5: the first token keeps its 1.5: 1.5 * 0.69 = 1.035
    assert loss_of(eps_clip_high=0.5)[0] == close(-(1.0035 - 0.828 + 1.035) / STD / 5)
    # dual clip 1.1: the last is at least 1.1 * -0.66 = -0.726
    assert loss_of(dual_clip=1.1)[0] == close(-(1.0035 + 0.825 - 0.726) / STD / 5)


def test_the_sequence_ratio_is_the_geometric_mean() -> None:
    loss, metrics = loss_of(ratio="sequence")
    a = 0.75 ** (1 / 3)
    b = 1.125**0.5  # of 1.5, 1, 0.5 and of 0.9, 1.25; neither is clipped
    assert metrics["policy/ratio"] == close((a + b) / 2)
    assert loss == close(-(a * (0.69 + 2 * 0.64 + 0.44) / 3 + b * (0.5 * -1.11 - 0.66) / 2) / STD / 2)


def test_kl_in_the_loss() -> None:
    # new - reference
    gaps = [math.log(1.5) + 0.5, 0.0, math.log(0.5) - 1.0, math.log(0.9) - 0.5, math.log(1.25)]
    weights = [1 * 1.5, 2 * 1.0, 1 * 0.5, 0.5 * 0.9, 1 * 1.25]  # of the sampler, times the ratio
    kl = sum(weight * gap**2 / 2 for weight, gap in zip(weights, gaps, strict=True)) / 5
    loss, metrics = loss_of(kl_in="loss", kl_estimator="k2", kl_coef=0.3)
    assert metrics["policy/kl_loss"] == close(kl)
    assert loss == close(-1.0035 / STD / 5 + 0.3 * kl)
    kl = sum(weight * (math.exp(-gap) - 1 + gap) for weight, gap in zip(weights, gaps, strict=True)) / 5
    assert loss_of(kl_in="loss", kl_estimator="k3", kl_coef=0.3)[0] == close(-1.0035 / STD / 5 + 0.3 * kl)
    # and the rewards are then free of it: A earns 2, B -1, so the last returns are those
    found = credited(ppo(kl_in="loss", kl_estimator="k2", whiten_advantages=False))
    assert [e.returns[-1].item() for e in found.experience] == close([2.0, -1.0])
    assert found.kl == close((0.125 + 0.5 + 0.125) / 5) and found.metrics["kl/coef"] == 0.1


def test_entropy_bonus() -> None:
    loss, metrics = loss_of(entropy_coef=0.1, entropy=1.3)
    assert metrics["policy/entropy"] == close(1.3)
    assert loss == close(-1.0035 / STD / 5 - 0.1 * 1.3)


def test_value_loss_of_the_recorded_rollout() -> None:
    new = layout([[0.0, 0.9, 1.0, 1.5], [0.0, 0.25, -0.1]])
    returns = layout([e.returns.tolist() for e in credited().experience])
    # A: clipped to 0.7: max(0.45^2, 0.65^2) = 0.4225;  0.8^2 = 0.64;  0.6^2 = 0.36
    # B: 0.95^2 = 0.9025;  clipped to -0.3: max(0.9^2, 0.7^2) = 0.81
    assert float(value_loss(new, layout(VALUES), returns, MASK, 0.2, 5).loss) == close(0.5 * 3.135 / 5)
