"""Arena-Hard's numbers against its formulas written out a second time (tests/support/arena.py), for v2.0 and v0.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.scores.arena_files import folders, label_of, read_judgments, read_styles, to_judgment
from evaluation.scores.arena_hard import (
    reference_controlled,
    reference_raw,
    reference_rows,
    seeded_indices,
)
from evaluation.scores.leaderboard import How, as_json, boards
from evaluation.scores.style import FEATURES, columns
from tests.support.arena import (
    BASELINE,
    ROUNDS,
    old_line,
    published_benchmark,
    their_controlled,
    their_features,
    their_raw,
    their_rows,
)

Published = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_benchmark(tmp_path_factory.mktemp("arena"))


def test_raw_scores_are_the_references(published: Published) -> None:
    folder, judgments, _ = published
    rows = reference_rows(read_judgments(folders(folder).judgments))
    theirs = their_rows(judgments)
    assert list(zip(rows.uids, rows.models, rows.outcomes, strict=True)) == theirs
    for model in ("dpo", "ppo", "tiny"):
        scores = [score for _, name, score in theirs if name == model]
        indices = seeded_indices(len(scores), ROUNDS, seed=1)
        ours = reference_raw(rows.outcomes[[name == model for name in rows.models]], indices)
        assert 100 * np.array(ours) == pytest.approx(100 * np.array(their_raw(scores, indices)), abs=0.1)


@pytest.mark.parametrize("controls", [("length", "markdown"), ("length",), ("markdown",)])
def test_style_controlled_scores_are_the_references(published: Published, controls: tuple[Any, ...]) -> None:
    """Also each control alone, where the original's slicing loses the models' columns: the formula here slices the features."""
    folder, judgments, answers = published
    places = folders(folder)
    assert places.answers is not None
    rows = reference_rows(read_judgments(places.judgments), read_styles(places.answers))
    indices = seeded_indices(len(rows.outcomes), ROUNDS, seed=2)
    ours = reference_controlled(rows, controls, indices)
    theirs = their_controlled(their_rows(judgments), their_features(their_rows(judgments), answers)[:, columns(controls)], indices)
    assert set(ours.scores) == {"dpo", "ppo", "tiny"} and theirs[BASELINE][0] == 0.5
    for model, score in ours.scores.items():
        assert 100 * np.array(score) == pytest.approx(100 * np.array(theirs[model]), abs=0.1)
    assert list(ours.effects) == [FEATURES[column] for column in columns(controls)]


def test_the_references_statistics_are_those_of_v2(published: Published) -> None:
    _, judgments, _ = published
    ours = [to_judgment(old_line(row)) for row in judgments]
    assert {j.baseline for j in ours} == {"gpt-4-0314"} and {j.category for j in ours} == {"arena-hard-v0.1"}
    assert boards(ours, None, How(rounds=10, max_failed=0.5))
    with pytest.raises(ValueError, match=r"these judgments are of arena-hard-v0\.1: leave --reference out"):
        boards(ours, None, How(method="reference", rounds=10, max_failed=0.5))


def test_the_reference_board_is_the_references_and_ours_stands_beside(
    published: Published,
) -> None:
    folder, judgments, _ = published
    judged, styles = read_judgments(folders(folder).judgments), read_styles(folder / "model_answer")
    (reference,) = boards(judged, styles, How(("length", "markdown"), "reference", 100))
    (ours,) = boards(judged, styles, How(("length", "markdown"), rounds=100))
    assert [row.model for row in ours.standings] == [row.model for row in reference.standings] == ["ppo", "dpo", "tiny"]
    for mine, theirs in zip(ours.standings, reference.standings, strict=True):
        rows = [score for _, model, score in their_rows(judgments) if model == mine.model]
        assert theirs.score.value == pytest.approx(np.mean(rows), abs=0.02)
        assert mine.score.value == pytest.approx(np.mean(rows), abs=0.005)  # but for the games the reference leaves out
        assert mine.controlled is not None and theirs.controlled is not None
        assert mine.questions == 100 and 0 <= mine.swap_consistency <= 1 and mine.tokens is not None
    assert json.loads(as_json([ours]))[0]["standings"][0]["score"]["value"] == ours.standings[0].score.value
    with pytest.raises(ValueError, match="needs the answer of"):
        boards(judged, {}, How(("length",), rounds=100))


def test_labels_in_lower_case_are_labels() -> None:
    assert label_of("b>>a") == "B>>A"
