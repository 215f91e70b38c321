"""How far annotators agree, with each other and with themselves, and files of labels that a calibration reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evaluation.labelling.agreement import agreement, cohen, krippendorff
from evaluation.labelling.label_store import LabelFile
from evaluation.scores.scoring import Floats
from rlhf_core.data.labels import load_labels
from rlhf_core.feedback.inbox import Inbox
from rlhf_core.feedback.leaks import Questions
from rlhf_core.feedback.receive import receive, rows_of
from tests.support.labelling import rated, row

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability": four observers, twelve units; None:
# missing.
OBSERVERS: list[list[int | None]] = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]
UNITS = [[value - 1 for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]


def test_krippendorffs_own_example() -> None:
    nominal = krippendorff(UNITS, 5, "nominal")
    ordinal = krippendorff(UNITS, 5, "ordinal")
    assert nominal is not None and round(nominal.value, 3) == 0.743
    assert ordinal is not None and round(ordinal.value, 3) == 0.815
    assert nominal.low < nominal.value < nominal.high <= 1


def test_cohens_kappa_of_a_published_table() -> None:
    """Fleiss, Cohen & Everitt (1969): 200 cases, kappa .429. By hand: 0.70 observed, 0.475 expected, 0.225 /
    0.525."""
    table = [[106, 10, 4], [22, 28, 10], [2, 12, 6]]
    ratings = [(i, j) for i, line in enumerate(table) for j, count in enumerate(line) for _ in range(count)]
    found = cohen(ratings, 3, "nominal")
    assert (
        found is not None and found.value == pytest.approx(0.225 / 0.525) and round(found.value, 3) == 0.429
    )
    assert 0.30 < found.low < 0.36 and 0.50 < found.high < 0.56


def test_weighted_kappa_is_lins_concordance() -> None:
    """Kappa with squared weights equals 2 cov / (var + var + (difference of means)^2) (Fleiss & Cohen 1973;
    Lin 1989)."""
    generator = np.random.default_rng(3)
    one = generator.integers(0, 5, 80)
    other = np.clip(one + generator.integers(-1, 2, 80), 0, 4)
    found = cohen(list(zip(one.tolist(), other.tolist(), strict=True)), 5, "ordinal")
    covariance = ((one - one.mean()) * (other - other.mean())).mean()
    assert found is not None
    assert found.value == pytest.approx(
        2 * covariance / (one.var() + other.var() + (one.mean() - other.mean()) ** 2)
    )


def test_agreement_by_chance_is_zero_and_opposite_verdicts_are_minus_one() -> None:
    assert (found := cohen([(0, 0), (0, 1), (1, 0), (1, 1)], 2, "nominal"))
    assert found.value == pytest.approx(0)
    assert (found := cohen([(0, 2), (2, 0)] * 5, 3, "nominal")) and found.value == pytest.approx(-1)


def test_full_agreement_has_an_interval_that_shrinks_with_the_pairs() -> None:
    lows = []
    for count in (5, 50, 500):
        for found in (
            cohen([(n % 3, n % 3) for n in range(count)], 3, "nominal"),
            krippendorff([[n % 3] * 3 for n in range(count)], 3, "nominal"),
        ):
            assert found is not None and found.value == 1 and found.high == 1 and found.low < 1
            lows.append(found.low)
    assert lows == sorted(lows) and lows[0] < 0.5 and lows[-1] > 0.98


def test_what_is_not_defined_has_no_value() -> None:
    assert cohen([], 3, "nominal") is None and krippendorff([[1], [2]], 3, "nominal") is None
    assert cohen([(1, 1)] * 9, 3, "nominal") is None and krippendorff([[1, 1]] * 9, 3, "ordinal") is None


JOINT = np.array([[0.30, 0.06, 0.05], [0.04, 0.12, 0.05], [0.05, 0.05, 0.28]])  # of two annotators
COUNT = 150
TIMES = 100


def kappa_of(joint: Floats) -> float:
    chance = float(joint.sum(1) @ joint.sum(0))
    return float((np.trace(joint) - chance) / (1 - chance))


def scotts_pi(joint: Floats) -> float:
    """What alpha of two annotators tends to (Scott 1955)."""
    shares = (joint.sum(0) + joint.sum(1)) / 2
    chance = float(shares @ shares)
    return float((np.trace(joint) - chance) / (1 - chance))


@pytest.mark.parametrize("measure", ["kappa", "alpha"])
def test_intervals_cover_the_truth(measure: str) -> None:
    truth = kappa_of(JOINT) if measure == "kappa" else scotts_pi(JOINT)
    covered = 0
    generator = np.random.default_rng(5)
    for time in range(TIMES):
        drawn = generator.choice(9, COUNT, p=JOINT.ravel())
        ratings = [(int(cell) // 3, int(cell) % 3) for cell in drawn]
        found = (
            cohen(ratings, 3, "nominal", seed=time)
            if measure == "kappa"
            else krippendorff(ratings, 3, "nominal", seed=time)
        )
        assert found is not None
        covered += found.low <= truth <= found.high
    assert 90 <= covered <= 99


def test_ordinal_intervals_cover_the_truth_with_three_annotators_and_gaps() -> None:
    """Three annotators each name the degree that is true, or one beside it; one in five labels is missing."""
    generator = np.random.default_rng(7)

    def drawn(count: int) -> list[list[int]]:
        true = generator.integers(0, 5, (count, 1))
        seen = np.clip(true + generator.choice([-1, 0, 1], (count, 3), p=[0.2, 0.6, 0.2]), 0, 4)
        there = generator.random((count, 3)) > 0.2
        return [
            [int(value) for value, is_there in zip(*unit, strict=True) if is_there]
            for unit in zip(seen, there, strict=True)
        ]

    truth = krippendorff(drawn(60_000), 5, "ordinal", rounds=1)
    assert truth is not None
    found = [krippendorff(drawn(COUNT), 5, "ordinal", seed=time) for time in range(TIMES)]
    covered = sum(one.low <= truth.value <= one.high for one in found if one is not None)
    assert 90 <= covered <= 99


def test_a_file_of_labels() -> None:
    """Ann and Bob share four pairs and agree on three; Cyd shares none; what was skipped or taken back does
    not count."""
    labels = rated(
        [[0, 0, 2, 1, None], [0, 0, 2, 2, None], [None, None, None, None, 0]], ["Ann", "Bob", "Cyd"]
    )
    labels += [
        row(id="s", uid="q9", annotator="Ann", verdict=None),
        row(id="x", uid="q8", annotator="Bob"),
        row(id="y", uid="q8", annotator="Ann"),
    ]
    labels += [row(id="u", uid="q8", annotator="Bob", verdict=None, undone="x")]
    found = agreement(labels)
    assert (found.pairs, found.shared) == (6, 4)
    (between,) = found.between
    assert (between.one, between.other, between.pairs, between.same.value) == ("Ann", "Bob", 4, 0.75)
    # expected by chance: A 2/4 * 2/4, tie 1/4 * 0, B 1/4 * 2/4
    assert between.kappa is not None and between.kappa.value == pytest.approx((0.75 - 0.375) / (1 - 0.375))
    ann, bob, cyd = found.annotators
    assert (ann.labels, ann.skipped, ann.ties, bob.labels, cyd.labels) == (5, 1, 0.2, 4, 1)
    assert found.alpha is not None and found.ordinal_alpha is not None and cyd.consistent is None
    assert ann.seconds == 2.5


def test_a_bias_to_one_side_and_changed_minds_are_measured() -> None:
    """Lea always prefers the answer on the left, so that each of her repeats, with swapped sides, names the
    other answer."""
    labels = []
    for n in range(40):
        side = "ab"[n % 2]
        labels.append(
            row(
                id=f"f{n}",
                uid=f"q{n}",
                annotator="Lea",
                shown_first=side,
                verdict="A>B" if side == "a" else "B>A",
            )
        )
    labels += [
        row(
            id=f"r{n}",
            uid=f"q{n}",
            annotator="Lea",
            shown_first="ba"[n % 2],
            verdict="B>A" if n % 2 == 0 else "A>B",
            repeat_of=f"f{n}",
        )
        for n in range(6)
    ]
    (lea,) = agreement(labels).annotators
    assert lea.first_side is not None and lea.first_side.value == 1 and lea.first_side.low > 0.85
    assert lea.consistent is not None
    assert (lea.repeats, lea.consistent.value) == (6, 0)
    assert lea.consistent.high < 0.5
    assert lea.labels == 40 and agreement(labels).between == []


def test_a_second_showing_is_no_second_vote() -> None:
    labels = rated([[0, 2, 0, 2], [0, 2, 0, 0]], ["Ann", "Bob"])
    again = [
        row(id=f"again{n}", uid=f"q{n}", annotator="Ann", verdict="A=B", repeat_of=f"Ann{n}")
        for n in range(4)
    ]
    one = agreement(labels)
    both = agreement(labels + again)
    assert (both.between, both.alpha, both.pairs) == (one.between, one.alpha, one.pairs)
    assert both.annotators[0].labels == 4 and both.annotators[0].repeats == 4


def test_no_labels() -> None:
    found = agreement([])
    assert (found.pairs, found.shared, found.alpha, found.between, found.annotators) == (0, 0, None, [], [])


def test_labels_of_the_page_calibrate_a_judge_and_become_rankings(tmp_path: Path) -> None:
    file = LabelFile(tmp_path / "labels.jsonl")
    about = {"answer_a": "good", "answer_b": "bad"}
    for label in (
        row(id="1", uid="q1", verdict="A>B", annotator="ann", **about),
        row(id="2", uid="q1", verdict="B>A", annotator="bob", **about),
        row(id="3", undone="2", verdict=None, annotator="bob", uid="q1", **about),
        row(id="4", uid="q1", verdict="A>>B", annotator="ann", repeat_of="1", **about),
        row(id="5", uid="q2", verdict=None, annotator="ann", answer_a="x", answer_b="y"),
        row(id="6", uid="q3", verdict="A=B", annotator="ann", answer_a="x", answer_b="z"),
    ):
        file.append(label)
    file.close()
    pairs = load_labels(tmp_path / "labels.jsonl")
    assert [(pair.uid, pair.answer_a, pair.votes) for pair in pairs] == [
        ("q1", "good", {"ann": 1}),
        ("q3", "x", {"ann": 0}),
    ]
    inbox = Inbox(tmp_path / "a.inbox")
    done = receive(inbox, rows_of(str(tmp_path / "labels.jsonl")), Questions(()))
    assert (done.wrong, done.new, done.duplicate) == (0, 1, 1)  # the second showing says the same
    (stored,) = inbox.rows(("ranking",))
    assert (stored.row.answers, stored.row.ranks, stored.row.annotator) == (("good", "bad"), (0, 1), "ann")
