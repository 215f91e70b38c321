"""Importance weights of tokens and answers, what they leave to train on, and the metrics that describe the
weights in use."""

import math

import numpy as np
import pytest
import torch

from rlhf_core.config import PPO, Data
from rlhf_core.objectives.actor_loss import count
from rlhf_core.objectives.sampler_weights import (
    importance_weights,
    kept_tokens,
    sampler_metrics,
    sampler_weights,
)

E = math.e
OLD = torch.tensor([[0.0, 1.0, 0.5, 5.0]], dtype=torch.float64)
SAMPLER = torch.zeros(1, 4, dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])
ONE_ANSWER = torch.zeros(1, 4, dtype=torch.int64)
TWO_ANSWERS = torch.tensor([[0, 0, 1, -1]])  # in a row, and padding


def ppo(**changes: object) -> PPO:
    return PPO(prompts=Data(sources="none"), **changes)


def weights(
    low: float, high: float, masked: bool = False, level: str = "token", documents: torch.Tensor | None = None
) -> list[float]:
    return importance_weights(OLD, SAMPLER, MASK, low, high, masked, level, documents)[0].tolist()


def test_weights_of_tokens_are_clamped_or_left_out() -> None:
    assert weights(0.0, 2.0) == pytest.approx([1.0, 2.0, E**0.5, 0.0])
    assert weights(0.0, 9.0) == pytest.approx([1.0, E, E**0.5, 0.0])
    assert weights(0.5, 2.0, masked=True) == pytest.approx([1.0, 0.0, E**0.5, 0.0])
    assert weights(1.2, 9.0) == pytest.approx([1.2, E, E**0.5, 0.0])


def test_weights_of_answers_are_the_product_or_the_geometric_mean() -> None:
    assert weights(0.0, 9.0, level="sequence", documents=ONE_ANSWER) == pytest.approx([E**1.5] * 3 + [0.0])
    assert weights(0.0, 9.0, level="geometric", documents=ONE_ANSWER) == pytest.approx([E**0.5] * 3 + [0.0])
    assert weights(0.0, 9.0, level="sequence", documents=TWO_ANSWERS) == pytest.approx([E, E, E**0.5, 0.0])
    assert weights(0.0, 9.0, level="geometric", documents=TWO_ANSWERS) == pytest.approx(
        [E**0.5, E**0.5, E**0.5, 0.0]
    )
    assert weights(0.5, 2.0, True, "sequence", ONE_ANSWER) == [0.0] * 4
    assert weights(0.5, 2.0, True, "geometric", ONE_ANSWER) == pytest.approx([E**0.5] * 3 + [0.0])


def test_a_huge_gap_is_capped_and_weights_have_no_gradient() -> None:
    old = (1e4 * OLD).requires_grad_()
    for level in ("token", "sequence", "geometric"):
        found = importance_weights(old, SAMPLER, MASK, 0.0, 2.0, False, level, ONE_ANSWER)
        assert found.max() == 2.0 and not found.requires_grad


def test_what_is_masked_leaves_the_denominator() -> None:
    old = OLD[0].numpy()
    sampler = SAMPLER[0].numpy()
    mask = MASK[0].numpy()
    assert kept_tokens(old, sampler, mask, ppo()).tolist() == [True, True, True, False]
    of_tokens = kept_tokens(old, sampler, mask, ppo(sampler_is="mask", sampler_is_clamp=(0.5, 2.0)))
    assert of_tokens.tolist() == [True, False, True, False]
    whole = ppo(sampler_is="mask", sampler_is_clamp=(0.5, 2.0), sampler_is_level="sequence")
    none = kept_tokens(old, sampler, mask, whole)
    assert none.tolist() == [False] * 4
    assert count([of_tokens, mask, none]) == (5.0, 2.0), "an answer without tokens is no answer of the mean"
    assert count([none]) == (1.0, 1.0), "a step without tokens has the loss 0"


def test_kept_tokens_are_those_with_a_weight() -> None:
    config = ppo(sampler_is="mask", sampler_is_level="geometric", sampler_is_clamp=(0.9, 1.1))
    dice = np.random.default_rng(0)
    for size in (1, 7, 300):
        gaps = dice.normal(0, 0.3, (2, size)).astype(np.float32)
        mask = dice.random(size) < 0.7
        rows = (torch.from_numpy(row)[None] for row in (*gaps, mask))
        found = sampler_weights(*rows, torch.zeros(1, size, dtype=torch.int64), config)
        assert ((found[0] > 0).numpy() == kept_tokens(*gaps, mask, config)).all()


GAPS = torch.tensor([0.0, math.log(4.0), math.log(0.25), 0.0])
LENGTHS = torch.tensor([2, 2])


def test_metrics_describe_the_weights_of_the_loss() -> None:
    # weights 1, 4, 0.25, 1; capped at 2: sum 4.25, squares 1 + 4 + 0.0625 + 1
    found = sampler_metrics(GAPS, LENGTHS, ppo())
    assert found["sampler/gap"] == pytest.approx(math.log(4) / 2)
    assert found["sampler/ratio_gap"] == pytest.approx((3 + 0.75) / 4)
    assert found["sampler/capped"] == 0.25
    assert found["sampler/weight_mean"] == pytest.approx(4.25 / 4)
    assert found["sampler/weight_max"] == pytest.approx(4.0)
    assert found["sampler/ess"] == pytest.approx(4.25**2 / (4 * 6.0625))


def test_metrics_of_masked_answers_count_answers() -> None:
    # products 4 and 0.25, both outside of 0.5 to 2: nothing is left
    found = sampler_metrics(
        GAPS, LENGTHS, ppo(sampler_is="mask", sampler_is_level="sequence", sampler_is_clamp=(0.5, 2.0))
    )
    assert (found["sampler/capped"], found["sampler/weight_mean"], found["sampler/ess"]) == (1.0, 0.0, 0.0)
    # geometric means 2 and 0.5 are within
    found = sampler_metrics(
        GAPS, LENGTHS, ppo(sampler_is="mask", sampler_is_level="geometric", sampler_is_clamp=(0.4, 2.5))
    )
    assert (found["sampler/capped"], found["sampler/weight_mean"]) == pytest.approx((0.0, 1.25))
    assert found["sampler/ess"] == pytest.approx(2.5**2 / (2 * 4.25))


@pytest.mark.parametrize(
    ("level", "clamp", "tokens", "answers"),
    [
        ("token", (0.5, 2.0), 0.75, 0.5),
        ("geometric", (0.8, 1.9), 0.75, 0.5),
        ("geometric", (0.3, 1.2), 0.0, 0.0),
        ("geometric", (0.9, 1.0001), 0.75, 0.5),
        ("sequence", (0.99, 1.01), 0.75, 0.5),
    ],
)
def test_metrics_tell_what_is_left_out(
    level: str, clamp: tuple[float, float], tokens: float, answers: float
) -> None:
    """Three tokens with the weight 0.4, whose answer has that geometric mean; one with 1. The third answer has no
    tokens."""
    gaps = torch.tensor([math.log(0.4)] * 3 + [0.0])
    config = ppo(sampler_is="mask", sampler_is_level=level, sampler_is_clamp=clamp)
    found = sampler_metrics(gaps, torch.tensor([3, 1, 0]), config)
    assert (found["sampler/masked_tokens"], found["sampler/masked_answers"]) == (tokens, answers)
    assert "sampler/masked_tokens" not in sampler_metrics(gaps, torch.tensor([3, 1]), ppo())


@pytest.mark.parametrize(("level", "gap", "length"), [("sequence", -0.05, 16000), ("token", -120.0, 2)])
def test_weights_of_0_are_left_out_like_small_ones(level: str, gap: float, length: int) -> None:
    """They are below the smallest number of float32."""
    config = ppo(sampler_is="mask", sampler_is_level=level, sampler_is_clamp=(0.5, 2.0))
    found = sampler_metrics(torch.full((length,), gap), torch.tensor([length]), config)
    assert found["sampler/capped"] == found["sampler/masked_tokens"] == found["sampler/masked_answers"] == 1


def test_an_answer_of_which_one_token_is_left_is_not_left_out() -> None:
    gaps = torch.tensor([math.log(9.0), 0.0])
    config = ppo(sampler_is="mask", sampler_is_clamp=(0.5, 2.0))
    found = sampler_metrics(gaps, torch.tensor([2]), config)
    assert (found["sampler/masked_tokens"], found["sampler/masked_answers"]) == (0.5, 0.0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_without_weights_or_gaps_nothing_is_capped(level: str) -> None:
    off = sampler_metrics(GAPS, LENGTHS, ppo(sampler_is="off", sampler_is_level=level))
    assert (off["sampler/capped"], off["sampler/weight_mean"], off["sampler/ess"]) == (0.0, 1.0, 1.0)
    alike = sampler_metrics(torch.zeros(3), torch.tensor([3, 0]), ppo(sampler_is_level=level))
    assert alike["sampler/gap"] == 0
    assert alike["sampler/capped"] == 0
    assert alike["sampler/weight_max"] == 1
    assert alike["sampler/ess"] == 1


def test_products_over_long_answers_leave_the_bounds_where_tokens_do_not() -> None:
    """2,000 tokens with gaps of 0.02 nats: no token's weight is cut, most products are, and no geometric mean
    is."""
    gaps = 0.02 * torch.randn(200 * 2000, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((200,), 2000)
    shares = {
        level: sampler_metrics(gaps, lengths, ppo(sampler_is="mask", sampler_is_level=level))[
            "sampler/capped"
        ]
        for level in ("token", "sequence", "geometric")
    }
    assert shares["token"] == shares["geometric"] == 0
    assert 0.2 < shares["sequence"] < 0.4
