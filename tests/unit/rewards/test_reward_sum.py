"""Rewards of several sources: their weighted sum, and those that compare the answers of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlhf_core.config import PPO, Data, Preferences
from rlhf_core.objectives.advantages import gdpo, grpo
from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Combined, Running, Term, combine, plain_sum, with_answers
from rlhf_core.rewards.reward_contract import RewardsFailed


def test_rewards_are_standardised_each_on_its_own_then_weighed_and_summed() -> None:
    by_source = {"model": np.array([1.0, 3.0, 5.0]), "rule": np.array([0.0, 1.0, 1.0])}
    terms = [Term("model", 0.5, "stored", (1.0, 2.0)), Term("rule", 2.0, "none", None)]
    combined = combine(by_source, terms, {})
    # (1-1)/2, (3-1)/2, (5-1)/2 = 0, 1, 2; half of that plus twice the rule
    assert combined.rewards.tolist() == [0.0, 2.5, 3.0]
    assert combined.scored.all() and with_answers({}, by_source, terms) == {}
    # before standardising: 0.5, 3.5, 4.5
    assert combined.metrics["reward/mean"] == pytest.approx(8.5 / 3)
    assert combined.metrics["reward/model/mean"] == 3.0 and combined.metrics[
        "reward/rule/mean"
    ] == pytest.approx(2 / 3)
    assert plain_sum(by_source, terms).tolist() == [0.5, 3.5, 4.5]


def test_an_answer_that_one_source_failed_on_has_no_reward_and_touches_no_statistic() -> None:
    terms = [Term("a", 1.0, "running", None), Term("b", 1.0, "none", None)]
    by_source = {"a": np.array([1.0, np.nan, 3.0]), "b": np.array([0.0, 1.0, 0.0])}
    statistics = with_answers({}, by_source, terms)
    combined = combine(by_source, terms, statistics)
    assert combined.scored.tolist() == [True, False, True]
    assert combined.rewards.tolist() == [-1.0, 0.0, 1.0]  # mean 2, std 1 of the two that a gave
    assert combined.metrics["reward/a/failed"] == 1 and combined.metrics["reward/b/failed"] == 0
    assert combined.metrics["reward/mean"] == 2.0 and statistics["a"].number == 2
    assert np.isnan(plain_sum({"a": np.array([np.nan]), "b": np.array([1.0])}, terms)).all()
    with pytest.raises(ValueError, match="none of 1 answers has a reward of every source"):
        combine({"a": np.array([np.nan]), "b": np.array([1.0])}, terms, {"a": Running()})


def test_running_statistics_are_those_of_all_values_at_once() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 7
    running = Running()
    for part in values.split([1, 20, 0, 29]):
        running = running.update(part)
    assert running.number == 50
    assert running.mean == pytest.approx(float(values.mean()))
    assert running.std == pytest.approx(float(values.std(correction=0)))
    assert Running().update(torch.full((4,), 2.0)).std == 1.0
    terms = [Term("a", 1.0, "running", None)]
    statistics: dict[str, Running] = {}
    for rewards in ([0.0, 2.0], [4.0, 6.0]):
        by_source = {"a": np.array(rewards)}
        statistics = with_answers(statistics, by_source, terms)
        second = combine(by_source, terms, statistics)
    assert second.rewards.tolist() == pytest.approx([(4 - 3) / 5**0.5, (6 - 3) / 5**0.5])  # of 0, 2, 4, 6


def test_a_finite_reward_beyond_float32_is_bounded_and_an_infinite_one_has_failed() -> None:
    by_source = {"a": np.array([1e308, -1e308, 1e39, 0.5, np.inf, -np.inf, np.nan])}
    for normalize in ("none", "running"):
        terms = [Term("a", 2.0, normalize, None)]  # type: ignore[arg-type]
        statistics = with_answers({}, by_source, terms)
        combined = combine(by_source, terms, statistics)
        assert combined.scored.tolist() == [True] * 4 + [False] * 3
        assert combined.rewards.isfinite().all() and combined.metrics["reward/a/failed"] == 3
        assert combined.rewards[0] == combined.rewards[2] > combined.rewards[3] > combined.rewards[1]
        assert np.isfinite(list(combined.metrics.values())).all(), "their squares are not finite in float32"
    large = np.float32(1e30)
    raw = combine(by_source, [Term("a", 1.0, "none", None)], {}).rewards
    assert raw.tolist() == [large, -large, large, 0.5, 0, 0, 0]
    assert plain_sum(by_source, [Term("a", 1.0, "none", None)])[:4].tolist() == [1e30, -1e30, 1e30, 0.5]


def test_parts_are_joined_and_chosen() -> None:
    first = Rewards({"a": np.array([1.0, np.nan])}, {"a": "x"})
    second = Rewards({"a": np.array([3.0])}, {})
    both = join([first, second])
    assert len(both) == 3 and both.errors == {"a": "x"}
    both.check(1)
    with pytest.raises(RewardsFailed, match=r"a left 1 of 3 answers .*the last error: x"):
        both.check(0)
    assert both.take([2, 0]).by_source["a"].tolist() == [3.0, 1.0]


RIGHT = Term("right", 1.0, "group", None)
SHORT = Term("short", 1.0, "group", None)
ROOT = 0.5**0.5  # of two different rewards: half their gap over their sample deviation


def combined(terms: list[Term], samples: int, **by_source: list[float]) -> Combined:
    return combine({name: np.array(values) for name, values in by_source.items()}, terms, {}, samples)


def test_each_source_is_standardised_within_its_group_before_the_sum() -> None:
    """The paper's example: two answers with two rewards. Answers that differ in both sources are further
    apart than those that differ in one; the sum alone, standardised, cannot tell them apart."""
    found = combined([RIGHT, SHORT], 2, right=[0, 1, 0, 1], short=[1, 1, 0, 1]).rewards
    assert found.tolist() == pytest.approx([-ROOT, ROOT, -2 * ROOT, 2 * ROOT], rel=1e-3)
    sums = torch.tensor([[1.0, 2.0], [0.0, 2.0]])
    assert grpo(sums).flatten().tolist() == pytest.approx([-ROOT, ROOT, -ROOT, ROOT], rel=1e-3)


def test_scales_do_not_matter_and_weights_do() -> None:
    small = combined([RIGHT, SHORT], 4, right=[0, 0, 1, 1], short=[0, 1, 2, 9]).rewards
    large = combined([RIGHT, SHORT], 4, right=[0, 0, 1, 1], short=[-1e9, 0, 1e9, 8e9]).rewards
    assert large.tolist() == pytest.approx(small.tolist(), rel=1e-3)
    alone = combined([SHORT], 4, short=[0, 1, 2, 9]).rewards
    weighed = combined([RIGHT, SHORT._replace(weight=3.0)], 4, right=[0, 0, 1, 1], short=[0, 1, 2, 9])
    assert (weighed.rewards - small).tolist() == pytest.approx((2 * alone).tolist(), rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_equal_rewards_say_nothing(value: float) -> None:
    assert combined([RIGHT], 3, right=[value] * 6).rewards.tolist() == [0.0] * 6


def test_an_answer_that_one_source_failed_on_is_not_in_its_group() -> None:
    nan = float("nan")
    found = combined([RIGHT, SHORT], 3, right=[0, 1, 1, nan, nan, 5], short=[0, nan, 1, 1, 1, 1])
    assert found.scored.tolist() == [True, False, True, False, False, True]
    # of the first group two answers are left, of the second one
    assert found.rewards.tolist() == pytest.approx([-2 * ROOT, 0, 2 * ROOT, 0, 0, 0], rel=1e-3)
    assert found.metrics["reward/right/failed"] == 2 and found.metrics["reward/short/failed"] == 1


def test_a_source_without_groups_keeps_its_scale() -> None:
    found = combined([RIGHT, Term("rule", 1.0, "none", None)], 2, right=[0, 1], rule=[100, 100]).rewards
    assert found.tolist() == pytest.approx([100 - ROOT, 100 + ROOT], rel=1e-5)


def test_the_sum_is_standardised_over_the_iteration() -> None:
    scores = torch.tensor([-1.0, 1.0, -3.0, 3.0, 7.0, 7.0, 5.0, 9.0])
    scored = torch.tensor([True] * 6 + [True, False])
    found = gdpo(scores, scored, 2)
    assert found.compared.tolist() == [True] * 6 + [False] * 2
    deviation = (20 / 5) ** 0.5  # of -1, 1, -3, 3, 0, 0
    known = [-1 / deviation, 1 / deviation, -3 / deviation, 3 / deviation, 0, 0, 0, 0]
    assert found.advantages.tolist() == pytest.approx(known, rel=1e-3)
    assert gdpo(torch.ones(4), torch.ones(4, dtype=torch.bool), 2).advantages.tolist() == [0.0] * 4
    nothing = gdpo(torch.ones(4), torch.zeros(4, dtype=torch.bool), 2)
    assert not nothing.compared.any() and not nothing.advantages.any()


@pytest.mark.parametrize("stage", [PPO, Preferences])
def test_one_answer_has_no_group(stage: type) -> None:
    fields = {"reward": {"function": "a.py:f", "normalize": "group"}, "prompts": Data(sources="none")}
    extra = {"advantage_estimator": "reinforce_pp"} if stage is PPO else {}
    with pytest.raises(ValidationError, match=r"normalize group compares .*: set n_samples"):
        stage(**fields, **extra, n_samples_per_prompt=1)
    assert stage(**fields, **extra, n_samples_per_prompt=2).reward[0].normalize == "group"


@pytest.mark.parametrize("post_processor", ["rejection_sampling", "conditional_sft"])
def test_rewards_that_count_across_prompts_are_not_standardised_within_each(post_processor: Any) -> None:
    def made(normalize: str, chosen: Any) -> Preferences:
        fields = {"reward": {"function": "a.py:f", "normalize": normalize}, "prompts": Data(sources="none")}
        return Preferences.model_validate(fields | {"post_processor": chosen})

    with pytest.raises(ValidationError, match=f"{post_processor}.*: set normalize to none or running"):
        made("group", post_processor)
    assert made("running", post_processor) and made("group", "dpo") and made("group", "kto")
