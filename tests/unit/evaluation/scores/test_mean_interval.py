"""The interval of a mean of scores: known values, worse answers never raise it, and it covers the truth."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from evaluation.scores.scoring import arena_sums, difference_interval, plain_sums, rate_interval, win_rate
from rlhf_core.mean_interval import mean_interval
from rlhf_core.records import Game, Judgment, Label
from tests.support.interval_coverage import KINDS, coverage, interval_of

LABELS: tuple[Label, ...] = ("A>>B", "A>B", "A=B", "B>A", "B>>A")  # of game 1, the best for the model first
ERROR = 1e-9  # of the computation


def of(*scores: float) -> tuple[float, float]:
    return mean_interval(np.array(scores), np.ones(len(scores)))


def battle(uid: str, first: Label, second: Label) -> Judgment:
    """`first` and `second` from the model's side: A is the model."""
    mirrored = dict(zip(LABELS, reversed(LABELS), strict=True))
    games = (Game(score=mirrored[first], judgment={}), Game(score=second, judgment={}))
    return Judgment(uid=uid, category="all", judge="j", model="m", baseline="b", games=games)


def counts_of(questions: int) -> list[tuple[int, int, int]]:
    """All numbers of (wins, ties, losses)."""
    return [
        (wins, ties, questions - wins - ties)
        for wins in range(questions + 1)
        for ties in range(questions + 1 - wins)
    ]


@pytest.mark.parametrize("questions", [6, 20])
def test_no_worse_answer_raises_an_end(questions: int) -> None:
    """All numbers of wins, ties and losses; from each, a win made a tie and a tie made a loss."""
    found = {(w, t, lost): interval_of((lost, 0, t, 0, w)) for w, t, lost in counts_of(questions)}
    assert len(found) == (questions + 1) * (questions + 2) // 2
    for (wins, ties, losses), (low, high) in found.items():
        worse = [(wins - 1, ties + 1, losses)] if wins else []
        worse += [(wins, ties - 1, losses + 1)] if ties else []
        for other in worse:
            assert found[other][0] <= low + ERROR and found[other][1] <= high + ERROR, (
                (wins, ties, losses),
                other,
            )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9), st.data())
def test_no_worse_verdict_raises_an_end_of_either_score(
    labels: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Five labels in two games, weighed alike and as Arena-Hard does (a strong one three times)."""
    question = data.draw(st.integers(0, len(labels) - 1))
    game = data.draw(st.integers(0, 1))
    worse = [list(pair) for pair in labels]
    worse[question][game] = min(4, worse[question][game] + 1)
    sides = [
        [battle(f"q{n}", LABELS[a], LABELS[b]) for n, (a, b) in enumerate(one)] for one in (labels, worse)
    ]
    for sums in (plain_sums, arena_sums):
        before, after = (rate_interval(sums(side)) for side in sides)
        assert after[0] <= before[0] + ERROR and after[1] <= before[1] + ERROR, sums.__name__


def test_twenty_wins_are_better_than_nineteen_and_a_tie_and_five_of_six_pass_no_gate_of_one_half() -> None:
    assert of(*[1.0] * 20)[0] > of(*[1.0] * 19, 0.5)[0] > of(*[1.0] * 19, 0.0)[0]
    won = win_rate([battle(f"q{n}", "A>B" if n else "B>A", "A>B" if n else "B>A") for n in range(6)])
    assert won.win_rate == pytest.approx(5 / 6) and won.ci_low == pytest.approx(0.4091, abs=1e-4)


OF = [(0, 1), (1, 1), (5, 6), (6, 6), (20, 20), (11, 50), (419, 420), (500_100, 1_000_000)]


@pytest.mark.parametrize(("wins", "questions"), OF)
def test_wins_and_losses_have_the_mid_p_interval_of_a_proportion(wins: int, questions: int) -> None:
    low, high = of(*[1.0] * wins, *[0.0] * (questions - wins))
    above = binom.sf(wins, questions, low) + binom.pmf(wins, questions, low) / 2
    below = binom.cdf(wins - 1, questions, high) + binom.pmf(wins, questions, high) / 2
    assert (above, below) == pytest.approx(
        (0.5 if wins == 0 else 0.025, 0.5 if wins == questions else 0.025), abs=1e-8
    )
    assert (low == 0) == (wins == 0) and (high == 1) == (wins == questions)


def test_the_ends_are_quantiles_of_random_weights() -> None:
    """A million draws of Dirichlet weights, of 9 questions and one that is won or lost."""
    scores = np.array([1, 1, 0.75, 0.5, 0.5, 0.5, 0.25, 0, 0])
    generator = np.random.default_rng(0)
    drawn = generator.exponential(size=(1_000_000, 10))
    means = (drawn[:, :9] @ scores + drawn[:, 9] * generator.integers(0, 2, 1_000_000)) / drawn.sum(1)
    assert mean_interval(scores, np.ones(9), level=0.9) == pytest.approx(
        np.quantile(means, [0.05, 0.95]), abs=1e-3
    )


def test_few_questions_leave_much_open_and_many_little() -> None:
    assert mean_interval(np.array([]), np.array([])) == (0, 1)
    assert of(0.5) == pytest.approx((0.025, 0.975))
    assert of(1.0) == pytest.approx((0.05, 1))
    assert of(0.0) == pytest.approx((0, 0.95))
    widths = [high - low for low, high in (of(*[0.5] * count) for count in (1, 4, 20, 400, 40_000))]
    assert all(more > less > 0 for more, less in pairwise(widths)) and widths[-1] < 1e-3
    scores = np.random.default_rng(0).choice([0, 0.25, 0.5, 0.75, 1], size=100_000)
    half = 1.959964 * scores.std() / len(scores) ** 0.5
    assert of(*scores) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=2e-5)


def test_few_light_questions_are_as_open_as_few_heavy_ones() -> None:
    """Weights have no unit; and where one question has nearly all of it, that one counts."""
    total = np.array([2.0, 1.0, 0.0])
    weight = np.array([2.0, 2.0, 2.0])
    assert mean_interval(total, weight, 2.0) == pytest.approx(mean_interval(total / 2, weight / 2))
    low, high = mean_interval(np.array([100.0, *[1.0] * 20]), np.array([100.0, *[1.0] * 20]), 100.0)
    assert low < 0.2 and high == 1


def test_differences_have_twice_the_range() -> None:
    low, high = difference_interval(np.zeros(100))
    assert low == pytest.approx(-high) and 0.02 < high < 0.04
    assert difference_interval(np.ones(6)) == pytest.approx((2 * of(*[1.0] * 6)[0] - 1, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("questions", "evaluations", "rates", "most"),
    [
        (6, 50_000, (0.5, 0.6, 0.7, 0.8, 0.9), 1.0),
        (20, 500, (0.5, 0.6, 0.8, 0.9), 0.99),
        (50, 300, (0.6, 0.95), 0.99),
        (420, 200, (0.6, 0.95), 0.99),
    ],
)
def test_it_covers_the_truth(
    kind: str, questions: int, evaluations: int, rates: tuple[float, ...], most: float
) -> None:
    """91 to 99 of 100; more with 6 questions, and where often all questions have the same score."""
    for rate in rates:
        chances = KINDS[kind](rate)
        all_alike = float(chances.max()) ** questions
        assert 0.91 <= coverage(chances, questions, evaluations) <= (1 if all_alike > 0.01 else most), rate
    assert coverage(KINDS[kind](1.0), questions, 10) == 1
