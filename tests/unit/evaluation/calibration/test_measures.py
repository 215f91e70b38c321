"""Measures of a judge against people: known small cases, and intervals that cover the truth of simulated
judges."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.calibration.measures import Observed, confusion, judge_signs, measure
from evaluation.scores.scoring import Floats

RUNS = 100


def observed(
    human: list[int],
    games: list[tuple[float, float]],
    uids: list[str] | None = None,
    longer: list[int] | None = None,
) -> Observed:
    """Pairs with one annotator each, and no difference of style unless `longer` has one."""
    signs = np.array(human)
    votes = np.stack([signs == 1, signs == 0, signs == -1], axis=1) * 1.0
    nothing = np.zeros(len(human), np.int64)
    return Observed(
        uids or [f"q{i}" for i in range(len(human))],
        np.array(games, np.float64),
        signs,
        nothing if longer is None else np.array(longer),
        nothing,
        votes,
        np.zeros((len(human), 2)),
    )


def consistent(sign: int) -> tuple[float, float]:
    return float(sign), float(-sign)


def test_a_judge_that_copies_people_has_kappa_one_and_no_bias() -> None:
    human = [1, 1, -1, 0, -1, 1, 0, -1] * 10
    found = measure(observed(human, [consistent(sign) for sign in human], longer=human), 500, 0)
    assert {
        name: found[name].value for name in ("agreement", "agreement_decided", "kappa", "swap_consistency")
    } == dict.fromkeys(("agreement", "agreement_decided", "kappa", "swap_consistency"), 1.0)
    assert found["position_bias"].value == found["length_bias"].value == 0
    assert "markdown_bias" not in found and "human_agreement" not in found and "human_repeat" not in found
    # 80 equal verdicts do not prove perfection: the mid-P bound for 80 of 80
    assert found["agreement"].ci_low == pytest.approx(0.05 ** (1 / 80)) and found["agreement"].ci_high == 1.0
    assert found["kappa"].ci_low == pytest.approx(0.05 ** (1 / 80))
    assert found["position_bias"].ci_low < 0 < found["position_bias"].ci_high


def test_kappa_and_confusion_are_those_of_a_worked_example() -> None:
    # Cohen's kappa by hand: p = (25 + 8) / 50 = 0.66, e = 0.8 * 0.54 + 0.2 * 0.46 = 0.524, kappa = 0.136 /
    # 0.476
    human = [1] * 40 + [-1] * 10
    judge = [1] * 25 + [-1] * 15 + [1] * 2 + [-1] * 8
    of = observed(human, [consistent(sign) for sign in judge])
    found = measure(of, 500, 0)
    assert found["agreement"].value == pytest.approx(0.66)
    assert found["kappa"].value == pytest.approx(0.136 / 0.476)
    assert confusion(of).tolist() == [[25, 0, 15], [0, 0, 0], [2, 0, 8]]
    assert found["kappa"].ci_low < 0.136 / 0.476 < found["kappa"].ci_high


def test_games_that_disagree_are_ties_and_show_the_position() -> None:
    games = [(1.0, 1.0), (1.0, -1.0), (1.0, 0.0), (-1.0, -1.0), (np.nan, 1.0), (np.nan, np.nan)]
    of = observed([1, 1, 0, -1, -1, 1], games)
    signs = judge_signs(of.games)
    assert signs[:5].tolist() == [0, 1, 1, 0, -1] and np.isnan(signs[5])
    found = measure(of, 200, 0)
    # pairs with two verdicts: nan would tilt the balance
    assert found["position_bias"].value == pytest.approx((1 + 0 + 0.5 - 1) / 4)
    assert found["swap_consistency"].value == pytest.approx(1 / 4)
    assert found["agreement"].value == pytest.approx(2 / 5) and found["agreement_decided"].value == 1.0
    assert int(confusion(of).sum()) == 5


def test_length_bias_is_the_judges_rate_minus_that_of_people() -> None:
    # longer: A in all pairs but the last, which has no difference; people prefer it in 2 of 4, the judge in 3
    # and a half
    of = observed([1, 1, -1, -1, -1], [consistent(sign) for sign in (1, 1, 1, 0, 1)], longer=[1, 1, 1, 1, 0])
    assert measure(of, 200, 0)["length_bias"].value == pytest.approx(3.5 / 4 - 2 / 4)


def test_errors_at_random_are_no_error_gap_though_they_move_the_rate() -> None:
    human = [1] * 40 + [-1] * 10  # people prefer the longer answer, A, in 40 of 50
    # a quarter of each is wrong; a tie is half an error
    wrong = [-1] * 10 + [1] * 30 + [1, 1] + [-1] * 3 + [0] + [-1] * 4
    found = measure(observed(human, [consistent(sign) for sign in wrong], longer=[1] * 50), 200, 0)
    assert found["length_error_gap"].value == pytest.approx(2.5 / 10 - 10 / 40)
    assert found["length_bias"].value == pytest.approx(-0.15)
    assert (
        measure(observed([1, 1], [consistent(1)] * 2, longer=[1, 1]), 50, 0)
        .keys()
        .isdisjoint({"length_error_gap"})
    )


def test_people_who_disagree_have_a_ceiling() -> None:
    votes = np.array([[3, 0, 0], [2, 0, 1], [0, 0, 2], [1, 0, 0], [0, 1, 1]], np.float64)
    repeats = np.array([[0, 0], [2, 1], [1, 1], [0, 0], [1, 1]], np.float64)
    of = observed([1, 1, -1, 1, 0], [consistent(1)] * 5)._replace(votes=votes, repeats=repeats)
    found = measure(of, 200, 0)
    among = (1 + 1 / 3 + 1 + 0) / 4  # the pair with one annotator says nothing about agreement
    chance = ((5 / 10) ** 2) + (1 / 10) ** 2 + (4 / 10) ** 2
    assert found["human_agreement"].value == pytest.approx(among)
    assert found["human_kappa"].value == pytest.approx((among - chance) / (1 - chance))
    assert found["human_repeat"].value == pytest.approx(3 / 4)
    alone = measure(of._replace(repeats=np.array([[1, 1], *[[0, 0]] * 4])), 200, 0)["human_repeat"]
    # one label says little
    assert (alone.value, alone.ci_high) == (1.0, 1.0) and alone.ci_low == pytest.approx(0.05)


def test_the_interval_resamples_questions_not_pairs() -> None:
    human = [1, -1] * 30
    judge = [1, -1, -1, 1] * 15
    games = [consistent(sign) for sign in judge]
    alone = measure(observed(human, games), 2000, 0)["agreement"]
    together = measure(observed(human, games, uids=[f"q{i // 2}" for i in range(60)]), 2000, 0)["agreement"]
    width = (together.ci_high - together.ci_low) / (alone.ci_high - alone.ci_low)
    assert width == pytest.approx(2**0.5, rel=0.15)  # both pairs of a question are right or wrong together


def test_a_judge_without_any_verdict_has_no_agreement() -> None:
    found = measure(observed([1, -1, 0], [(np.nan, np.nan)] * 3), 50, 0)
    assert found == {}


class Judge:
    """A simulated judge on pairs whose longer answer people prefer with chance 0.6, and call a tie with
    chance 0.2.

    Each game follows people with chance `skill`, else picks at random; then with chance `position` the answer
    shown first, and with chance `length` the longer one, wins whatever was thought.
    """

    def __init__(self, skill: float, position: float, length: float):
        self.skill = skill
        self.position = position
        self.length = length

    def judge(self, count: int, generator: np.random.Generator) -> Observed:
        longer = generator.choice([1, -1], count)
        human = np.where(
            generator.random(count) < 0.2, 0, longer * np.where(generator.random(count) < 0.6, 1, -1)
        )
        games = np.stack(
            [self._game(human, longer, 1, generator), self._game(human, longer, -1, generator)], axis=1
        )
        votes = np.stack([human == 1, human == 0, human == -1], axis=1) * 1.0
        marked = np.zeros(count, np.int64)
        return Observed(
            [str(i) for i in range(count)], games, human, longer, marked, votes, np.zeros((count, 2))
        )

    def _game(
        self, human: np.ndarray, longer: np.ndarray, shown: int, generator: np.random.Generator
    ) -> Floats:
        """Returns 1 where the answer shown first wins; `shown` is 1 when that is A."""
        of_a = np.where(
            generator.random(len(human)) < self.skill, human, generator.choice([1, 0, -1], len(human))
        )
        of_a = np.where(generator.random(len(human)) < self.length, longer, of_a)
        return np.where(generator.random(len(human)) < self.position, 1, of_a * shown).astype(np.float64)


@pytest.mark.parametrize(
    "judge",
    [Judge(0.8, 0.0, 0.0), Judge(0.7, 0.2, 0.0), Judge(0.7, 0.05, 0.25)],
    ids=["fair", "position", "length"],
)
def test_intervals_cover_the_truth_of_simulated_judges(judge: Judge) -> None:
    generator = np.random.default_rng(27)
    names = ("agreement", "kappa", "position_bias", "length_bias", "length_error_gap", "swap_consistency")
    truth = measure(judge.judge(400_000, generator), 1, 0)
    assert truth["position_bias"].value == pytest.approx(judge.position, abs=0.005)
    assert (
        (truth["length_error_gap"].value > 0.2)
        if judge.length
        else (abs(truth["length_error_gap"].value) < 0.005)
    )
    covered = dict.fromkeys(names, 0)
    for seed in range(RUNS):
        found = measure(judge.judge(250, generator), 400, seed)
        for name in names:
            covered[name] += found[name].ci_low <= truth[name].value <= found[name].ci_high
    assert all(90 <= count <= 99 for count in covered.values()), covered
