"""Metrics of how answers differ: groups without a signal, lengths, advantages, sides of the clip."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import PPO
from rlhf_core.config.metrics.metric import names_for
from rlhf_core.config.metrics.ppo.ppo_metrics import REINFORCED
from rlhf_core.objectives.losses import policy_loss
from rlhf_core.stages.ppo.measured.answer_spread import (
    advantage_spread,
    group_signal,
    length_correlation,
    length_spread,
)
from rlhf_core.stages.ppo.rewards.credit import spread_of
from rlhf_core.stages.ppo.rewards.shaped_rewards import Shaped


def share(rewards: list[float], samples: int, scored: list[bool] | None = None) -> float | None:
    known = torch.tensor(scored) if scored else torch.ones(len(rewards), dtype=torch.bool)
    return group_signal(torch.tensor(rewards), known, samples).get("reward/equal_groups")


def test_groups_of_one_reward_have_no_signal() -> None:
    assert share([0, 0, 1, 1, 0, 1], 2) == pytest.approx(2 / 3)
    assert share([0.1] * 999, 3) == 1
    assert share([1e30, -1e30], 2) == 0
    assert share([1, 1 + 1e-6, 2, 2], 2) == 0.5


def test_answers_without_a_reward_are_not_compared() -> None:
    assert share([0, 5, 0, 1], 2, [True, False, True, True]) == 0, "the first prompt has one rewarded answer"
    assert share([7, 5, 5], 3, [False, True, True]) == 1
    assert share([0, 5], 2, [True, False]) is None


def correlation(rewards: list[float], lengths: list[int], samples: int) -> float:
    scored = torch.ones(len(rewards), dtype=torch.bool)
    return length_correlation(torch.tensor(rewards), torch.tensor(lengths), scored, samples)


def test_reward_and_length_are_compared_within_a_prompt() -> None:
    """The second prompt wants long answers and is well rewarded; within each prompt short ones are."""
    rewards = [1.0, 0.0, 9.0, 8.0]
    lengths = [1, 3, 101, 103]
    assert correlation(rewards, lengths, 2) == pytest.approx(-1)
    assert correlation(rewards, lengths, 1) > 0.9, "without groups all answers are compared"


@pytest.mark.parametrize(
    ("rewards", "lengths"),
    [([0.1, 0.1, 0.1], [1, 2, 3]), ([1.0, 2.0, 3.0], [5, 5, 5]), ([1.0], [5]), ([1e38, 1e38], [1, 9])],
)
def test_what_does_not_vary_is_not_correlated(rewards: list[float], lengths: list[int]) -> None:
    assert correlation(rewards, lengths, 1) == 0


def test_a_failed_reward_is_left_out_of_the_correlation() -> None:
    scored = torch.tensor([True, True, False])
    rewards = torch.tensor([1.0, 2.0, 0.0])
    assert length_correlation(rewards, torch.tensor([1, 2, 900]), scored, 1) == pytest.approx(1)
    assert length_correlation(rewards, torch.tensor([1, 2, 900]), torch.zeros(3, dtype=torch.bool), 1) == 0


def test_lengths_have_percentiles() -> None:
    found = length_spread(torch.arange(101))
    assert found == {
        "response/length_p10": 10,
        "response/length_p50": 50,
        "response/length_p90": 90,
        "response/length_max": 100,
    }
    assert set(length_spread(torch.tensor([7])).values()) == {7}


def test_advantages_have_a_spread() -> None:
    assert advantage_spread(torch.tensor([1.0, -3.0])) == {"advantage/std": 2, "advantage/max": 3}
    assert advantage_spread(torch.zeros(4)) == {"advantage/std": 0, "advantage/max": 0}
    assert advantage_spread(torch.tensor([5.0])) == {"advantage/std": 0, "advantage/max": 5}


@pytest.mark.parametrize("cispo", [False, True])
def test_clipped_tokens_have_a_side(cispo: bool) -> None:
    """Ratios 0.5, 1, 2 and 3; advantages so that the first, the third and the fourth are clipped."""
    ratio = torch.tensor([[0.5, 1.0, 2.0, 3.0]])
    advantages = torch.tensor([[-1.0, -1.0, 1.0, 1.0]])
    ones = torch.ones_like(ratio)
    mask = ones.bool()
    metrics = policy_loss(
        ratio.log(), torch.zeros_like(ratio), advantages, mask, 0.2, 0.2, ones, 4.0, cispo=cispo
    ).metrics
    assert float(metrics["policy/clip_share_low"]) == 0.25
    assert float(metrics["policy/clip_share_high"]) == 0.5
    assert float(metrics["policy/clip_share"]) == 0.75


def test_a_dual_clip_is_on_the_high_side() -> None:
    ratio = torch.tensor([[9.0]])
    ones = torch.ones_like(ratio)
    loss = policy_loss(ratio.log(), 0 * ratio, -ones, ones.bool(), 0.2, 0.2, ones, 1.0, dual_clip=3.0)
    assert float(loss.metrics["policy/clip_share_high"]) == 1
    assert float(loss.metrics["policy/clip_share_low"]) == 0


def test_without_a_reward_no_group_is_said_to_be_equal() -> None:
    """Distillation learns from the KL."""
    fields = {"prompts": {"sources": "p.jsonl"}, "advantage_estimator": "rloo", "n_samples_per_prompt": 2}
    rewarded = PPO.model_validate({**fields, "reward": "a.py:f"})
    distilled = PPO.model_validate({**fields, "reward": "none", "reference": "org/teacher"})
    scored = torch.ones(2, dtype=torch.bool)
    shaped = Shaped(torch.zeros(2), torch.zeros(2), {}, {})
    assert "reward/equal_groups" in spread_of(shaped, scored, torch.tensor([3, 4]), rewarded)
    assert "reward/equal_groups" not in spread_of(shaped, scored, torch.tensor([3, 4]), distilled)
    names = [names_for(REINFORCED, config) for config in (rewarded, distilled)]
    assert ["reward/equal_groups" in known for known in names] == [True, False]
