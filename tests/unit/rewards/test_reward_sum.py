"""Rewards of several sources as one: standardised each on its own, weighed, summed; what has no reward of one
has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_core.rewards.clients import Rewards, join
from rlhf_core.rewards.combine import Running, Term, combine, plain_sum, with_answers
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
