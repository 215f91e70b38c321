"""Numbers about reward models: by hand, by symmetry, in simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.scores.reward_accuracy import (
    HeldOutPairs,
    RewardReports,
    calibration,
    evaluate,
    metrics,
    right,
)


def pairs(
    chosen: list[int], rejected: list[int], subsets: list[str] | None = None, prompts: list[str] | None = None
) -> HeldOutPairs:
    count = len(chosen)
    return HeldOutPairs(
        prompts or [f"p{n}" for n in range(count)],
        subsets or ["all"] * count,
        np.array(chosen),
        np.array(rejected),
    )


def test_a_report_by_hand() -> None:
    differences = {"rm": np.array([2.0, -1.0, 0.0, 0.5])}
    given = pairs([10, 5, 7, 3], [4, 9, 7, 8], ["a", "a", "b", "b"])
    (report,) = evaluate(given, differences, bins=10).models
    assert report.overall.accuracy == pytest.approx((1 + 0 + 0.5 + 1) / 4) and report.overall.pairs == 4
    assert report.overall.ci_low <= 0.625 <= report.overall.ci_high
    assert {name: accuracy.accuracy for name, accuracy in report.by_subset.items()} == {"a": 0.5, "b": 0.75}
    # Uneven pairs: 1 prefers the longer, 2 prefers the rejected, which is longer, 4 prefers the shorter.
    assert report.longer_preferred == pytest.approx(2 / 3) and report.longer_chosen == pytest.approx(1 / 3)
    assert report.accuracy_longer == 1.0 and report.accuracy_shorter == pytest.approx(0.5)
    confidence = 1 / (1 + np.exp(-np.array([2.0, 1.0, 0.0, 0.5])))
    assert sum(part.pairs for part in report.calibration) == 4
    # Bins of 0.05: 0.88, 0.73, 0.5, 0.62 are alone in theirs.
    assert report.calibration_error == pytest.approx(np.abs(confidence - np.array([1, 0, 0.5, 1])).mean())


def test_two_models_agree_where_they_prefer_the_same() -> None:
    differences = {
        "a": np.array([1.0, 2.0, -1.0, 0.0]),
        "b": np.array([0.1, -3.0, -0.2, 0.0]),
        "c": np.array([2.0, 4.0, -2.0, 0.0]),
    }
    found = evaluate(pairs([1] * 4, [1] * 4), differences, 10)
    shares = {(a.first, a.second): (a.agreement, a.correlation) for a in found.agreement}
    assert shares["a", "b"][0] == 0.75 and shares["a", "c"] == (1.0, pytest.approx(1.0))
    assert found.models[0].longer_preferred is None and found.models[0].length_correlation is None
    told = metrics(found)
    assert told["reward_agreement/a/b"] == 0.75
    assert "reward_longer_preferred/a" not in told
    assert told["reward_accuracy/c"] == 0.625
    assert RewardReports.model_validate_json(found.model_dump_json()) == found


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30))
def test_turning_every_pair_around_mirrors_accuracy_and_length_and_keeps_calibrations_confidence(
    values: list[float],
) -> None:
    generator = np.random.default_rng(len(values))
    long = generator.integers(1, 9, len(values)).tolist()
    short = generator.integers(1, 9, len(values)).tolist()
    differences = np.array(values)
    (ours,) = evaluate(pairs(long, short), {"rm": differences}, 5).models
    (theirs,) = evaluate(pairs(short, long), {"rm": -differences}, 5).models
    assert theirs.overall.accuracy == pytest.approx(1 - ours.overall.accuracy)
    assert theirs.longer_preferred == pytest.approx(ours.longer_preferred)
    assert [part.confidence for part in theirs.calibration] == pytest.approx(
        [part.confidence for part in ours.calibration]
    )


def test_a_calibrated_model_has_a_small_error_and_an_overconfident_one_a_large_one() -> None:
    generator = np.random.default_rng(0)
    margins = generator.normal(0, 2, 20_000)
    better = generator.random(20_000) < 1 / (1 + np.exp(-margins))
    differences = np.where(better, margins, -margins)  # of the chosen answer, as people chose
    honest, loud = (
        evaluate(pairs([1] * 20_000, [1] * 20_000), {"rm": d}, 10).models[0]
        for d in (differences, 4 * differences)
    )
    assert honest.calibration_error < 0.01 < 0.1 < loud.calibration_error
    assert honest.overall.accuracy == loud.overall.accuracy
    assert [part.accuracy for part in honest.calibration] == pytest.approx(
        [part.confidence for part in honest.calibration], abs=0.03
    )


def test_a_model_that_counts_tokens_is_found_out() -> None:
    generator = np.random.default_rng(1)
    chosen = generator.integers(1, 100, 2000)
    rejected = generator.integers(1, 100, 2000)
    (report,) = evaluate(
        pairs(chosen.tolist(), rejected.tolist()), {"rm": 0.1 * (chosen - rejected)}, 10
    ).models
    assert report.longer_preferred == 1.0 and report.longer_chosen == pytest.approx(0.5, abs=0.05)
    assert report.accuracy_longer == 1.0
    assert report.accuracy_shorter == 0.0
    assert report.length_correlation == pytest.approx(1.0)


def test_pairs_of_one_prompt_are_one_cluster() -> None:
    correct = np.repeat(np.array([1.0, -1.0] * 40), 5)
    prompts = [f"p{n // 5}" for n in range(400)]
    apart, together = (
        evaluate(pairs([1] * 400, [1] * 400, prompts=names), {"rm": correct}, 10).models[0].overall
        for names in (None, prompts)
    )
    assert apart.accuracy == together.accuracy == 0.5
    assert (together.ci_high - together.ci_low) / (apart.ci_high - apart.ci_low) == pytest.approx(
        5**0.5, rel=0.15
    )


def test_equal_scores_are_half_right() -> None:
    assert right(np.array([0.0, 1.0, -1.0])).tolist() == [0.5, 1.0, 0.0]
    (part,) = calibration(np.zeros(3), 10)
    assert (part.pairs, part.confidence, part.accuracy) == (3, 0.5, 0.5)
