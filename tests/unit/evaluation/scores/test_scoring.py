"""Scores of battles: by hand, by symmetry, and in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.scores.scoring import (
    QuestionSums,
    agreement,
    arena_sums,
    bootstrap_interval,
    plain_sums,
    win_rate,
)
from rlhf_core.records import Game, Judgment, Label

LABELS: tuple[Label, ...] = ("A>>B", "A>B", "A=B", "B>A", "B>>A")


def battle(
    uid: str,
    first: Label | None,
    second: Label | None,
    model: str = "ppo",
    category: str = "all",
    judge: str = "j",
) -> Judgment:
    games = (Game(score=first, judgment={"answer": ""}), Game(score=second, judgment={"answer": ""}))
    return Judgment(uid=uid, category=category, judge=judge, model=model, baseline="sft", games=games)


def battles(labels: Sequence[tuple[Label | None, Label | None]]) -> list[Judgment]:
    return [battle(f"q{number}", *pair, category="ab"[number % 2]) for number, pair in enumerate(labels)]


verdicts = st.lists(st.tuples(st.sampled_from(LABELS), st.sampled_from(LABELS)), min_size=1, max_size=20)


def test_a_win_rate_computed_by_hand() -> None:
    judged = [
        battle("1", "B>A", "A>B", category="sums"),  # the model wins both: 1
        battle("2", "A>>B", "A=B", category="sums"),  # 0 and 0.5: 0.25
        battle("3", "B>>A", None, category="sorts"),  # 1, and a game without a verdict: 1
        battle("4", None, None, category="sorts"),  # nothing: no question of the score
    ]
    rate = win_rate(judged)
    assert [judgment.score for judgment in judged] == [1.0, 0.25, 1.0, None]
    assert rate.win_rate == pytest.approx((1 + 0.25 + 1) / 3)
    assert (rate.num_questions, rate.num_failed) == (3, 3)
    assert (rate.num_won, rate.num_tied, rate.num_lost) == (2, 0, 1)
    assert rate.by_category == pytest.approx({"sums": 0.625, "sorts": 1.0})
    assert rate.swap_consistency == 0.5  # of the questions 1 and 2, which have two verdicts
    # Rows: 1, 1 | 0, 0, 0, 0.5 | 1, 1, 1
    assert rate.arena_score == pytest.approx(5.5 / 9)
    assert rate.ci_low <= rate.win_rate <= rate.ci_high


def test_ties_are_counted_apart_from_wins() -> None:
    won = ("B>A", "A>B")
    tied = ("A>B", "A>B")
    lost = ("A>B", "B>A")  # a game each is a tie, too
    rate = win_rate(battles([won] * 214 + [tied] * 202 + [lost] * 4))
    assert rate.win_rate == pytest.approx(0.75)
    assert rate.counted == "won 214, lost 4 and tied 202 of 420 battles"


def test_nothing_judged_is_an_error_and_not_a_score() -> None:
    with pytest.raises(ValueError, match="no game has a verdict"):
        win_rate([battle("1", None, None)])


def swap(judgment: Judgment) -> Judgment:
    """The same battle seen from the baseline's side: its game 0 (A is the baseline) is the other side's game
    1."""
    return judgment.model_copy(
        update=dict(
            model=judgment.baseline, baseline=judgment.model, games=(judgment.games[1], judgment.games[0])
        )
    )


@given(verdicts)
def test_swapping_model_and_baseline_mirrors_score_and_interval(labels: list[tuple[Label, Label]]) -> None:
    judged = battles(labels)
    ours, theirs = (win_rate(side) for side in (judged, [swap(judgment) for judgment in judged]))
    assert (theirs.model, theirs.baseline) == ("sft", "ppo")
    assert theirs.win_rate == pytest.approx(1 - ours.win_rate)
    assert (theirs.ci_low, theirs.ci_high) == pytest.approx((1 - ours.ci_high, 1 - ours.ci_low))
    assert theirs.arena_score == pytest.approx(1 - ours.arena_score)
    assert theirs.swap_consistency == ours.swap_consistency
    assert [swap(swap(judgment)) for judgment in judged] == judged


@given(st.sampled_from(LABELS), st.integers(1, 20))
def test_a_judge_that_always_says_the_same_gives_one_half(label: Label, count: int) -> None:
    rate = win_rate(battles([(label, label)] * count))
    assert (rate.win_rate, rate.arena_score) == (0.5, 0.5)
    assert rate.ci_low + rate.ci_high == pytest.approx(1) and rate.ci_low < 0.5
    assert rate.swap_consistency == (1.0 if label == "A=B" else 0.0)


@pytest.mark.parametrize(
    ("won", "bounds"), [(True, {1: 0.05, 4: 0.4729, 20: 0.8609}), (False, {1: 0.95, 4: 0.5271, 20: 0.1391})]
)
def test_questions_that_all_say_the_same_leave_as_much_open_as_there_are_few(
    won: bool, bounds: dict[int, float]
) -> None:
    """The mid-P interval, which is 0.05^(1 / n) to 1 where all n are won."""
    for count, bound in bounds.items():
        rate = win_rate(battles([("B>A", "A>B") if won else ("A>B", "B>A")] * count))
        assert (rate.ci_low, rate.ci_high) == pytest.approx((bound, 1.0) if won else (0.0, bound), abs=1e-4)


@given(verdicts)
def test_repeating_every_question_changes_nothing(labels: list[tuple[Label, Label]]) -> None:
    judged = battles(labels)
    once = win_rate(judged)
    twice = win_rate(judged + judged)
    assert twice.win_rate == pytest.approx(once.win_rate)
    assert (twice.ci_low, twice.ci_high) == pytest.approx((once.ci_low, once.ci_high))
    assert twice.num_questions == once.num_questions


def test_repeating_questions_under_new_names_keeps_the_intervals_centre_and_narrows_it() -> None:
    judged = battles([("B>A", "A>B"), ("B>A", "B>A"), ("A>B", "B>A"), ("A=B", "A>B")] * 10)
    copies = [
        judgment.model_copy(update={"uid": f"{judgment.uid}-copy-{n}"})
        for n in range(4)
        for judgment in judged
    ]
    once = win_rate(judged)
    more = win_rate(copies)
    assert more.win_rate == pytest.approx(once.win_rate)
    assert (more.ci_low + more.ci_high) / 2 == pytest.approx((once.ci_low + once.ci_high) / 2, abs=0.01)
    assert (more.ci_high - more.ci_low) / (once.ci_high - once.ci_low) == pytest.approx(0.5, abs=0.05)


@given(verdicts, st.randoms(use_true_random=False))
def test_the_order_of_questions_changes_nothing(labels: list[tuple[Label, Label]], random) -> None:
    judged = battles(labels)
    shuffled = random.sample(judged, len(judged))
    ours = win_rate(judged)
    theirs = win_rate(shuffled)
    assert (theirs.win_rate, theirs.ci_low, theirs.ci_high) == pytest.approx(
        (ours.win_rate, ours.ci_low, ours.ci_high)
    )


def test_every_label_scores_in_both_games() -> None:
    as_baseline = [battle("q", label, None).score for label in LABELS]
    as_model = [battle("q", None, label).score for label in LABELS]
    assert as_baseline == [0, 0, 0.5, 1, 1]  # A is the baseline in game 0
    assert as_model == [1, 1, 0.5, 0, 0]
    assert all(better >= worse for better, worse in pairwise(as_model))


def test_strong_verdicts_count_three_times_in_arenas_score_only() -> None:
    judged = [battle("1", None, "A>>B"), battle("2", None, "B>A")]
    assert plain_sums(judged).score == 0.5
    assert arena_sums(judged).score == 0.75


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    sums = plain_sums(battles([("B>A", "A>B"), ("A=B", "B>A"), ("A>B", "B>A"), ("A>B", "A>B")] * 5))
    assert bootstrap_interval(sums, 500, seed=7) == bootstrap_interval(sums, 500, seed=7)
    assert len({bootstrap_interval(sums, 100, seed=seed) for seed in range(20)}) > 1


def test_many_questions_are_resampled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = plain_sums(battles([("B>A", "A>B"), ("A=B", "B>A"), ("A>B", "B>A")] * 5))
    whole = bootstrap_interval(sums, 200, seed=7)
    monkeypatch.setattr("evaluation.scores.scoring.CELLS", 100)
    assert bootstrap_interval(sums, 200, seed=7) == pytest.approx(whole)


def test_intervals_cover_the_truth() -> None:
    """500 evaluations of 150 questions, games of a question correlated: 95 % intervals hold the true rate 92
    to 98 % of the time.

    Binomial noise of 500 trials at 0.95 has a standard deviation of 0.01.
    """
    generator = np.random.default_rng(0)
    truth = 0.6
    covered = 0
    for trial in range(500):
        rates = generator.beta(1.2, 0.8, size=150)  # mean 0.6
        games = generator.random((150, 2)) < rates[:, None]
        judged = battles([("B>A" if first else "A>B", "A>B" if second else "B>A") for first, second in games])
        low, high = bootstrap_interval(plain_sums(judged), 400, seed=trial)
        covered += low <= truth <= high
    assert 0.92 <= covered / 500 <= 0.98


def test_ninety_percent_intervals_cover_the_truth_nine_times_in_ten() -> None:
    """2,000 evaluations of 200 questions with strong and weak verdicts: 90 % +- 2 (binomial noise: 0.7)."""
    generator = np.random.default_rng(1)
    truth = 0.57
    covered = 0
    for trial in range(2000):
        scores = generator.choice([0.0, 0.25, 0.5, 0.75, 1.0], size=200, p=[0.15, 0.12, 0.26, 0.24, 0.23])
        low, high = bootstrap_interval(QuestionSums(scores, np.ones(200)), 400, seed=trial, level=0.9)
        covered += low <= truth <= high
    assert np.dot([0.0, 0.25, 0.5, 0.75, 1.0], [0.15, 0.12, 0.26, 0.24, 0.23]) == pytest.approx(truth)
    assert 0.88 <= covered / 2000 <= 0.92


def test_games_of_one_question_are_not_independent() -> None:
    """Two games that always agree are worth one: resampled as independent rows, the interval would be
    narrower by sqrt(2)."""
    judged = battles([("B>A", "A>B"), ("A>B", "B>A")] * 100)
    rows = [
        battle(f"{judgment.uid}/{game}", *pair)
        for judgment in judged
        for game, pair in enumerate(_single_games(judgment))
    ]
    clustered, independent = (bootstrap_interval(plain_sums(each), 4000, seed=0) for each in (judged, rows))
    assert (clustered[1] - clustered[0]) / (independent[1] - independent[0]) == pytest.approx(
        2**0.5, abs=0.08
    )


def _single_games(judgment: Judgment) -> list[tuple[Label | None, Label | None]]:
    return [(judgment.games[0].score, None), (None, judgment.games[1].score)]


def test_agreement_of_judges_counts_battles_with_the_same_winner() -> None:
    ours = [
        battle("1", "B>A", "A>B"),
        battle("2", "A=B", "A=B"),
        battle("3", "A>B", "B>A"),
        battle("4", "A>B", "B>A"),
    ]
    theirs = [
        battle("1", "B>A", "A=B"),
        battle("2", "A>B", "A>B"),
        battle("3", "B>A", "A>B"),
        battle("4", None, None),
    ]
    # 1 and 2 agree, 3 does not, 4 does not count
    assert agreement(ours, theirs) == agreement(theirs, ours) == pytest.approx(2 / 3)
    assert agreement(ours, [battle("9", "A>B", "A>B")]) is None


def test_judgments_are_written_in_arena_hards_format_and_read_back() -> None:
    judgment = battle("1", "A>>B", None)
    row = judgment.model_dump(mode="json")
    assert set(row) == {"uid", "category", "judge", "model", "baseline", "games"}
    assert [set(game) for game in row["games"]] == [{"score", "judgment", "prompt"}] * 2
    assert Judgment.model_validate_json(judgment.model_dump_json()) == judgment
