"""Arena-Hard's scores beside its formulas written out a second time (tests/support/arena.py), for v2.0 and
v0.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.scores.arena_files import folders, read_judgments, read_styles, to_judgment
from evaluation.scores.bradley_terry import fit, one_hot
from evaluation.scores.leaderboard import How, as_json, boards
from rlhf_core.judging.judge_reply import label_of
from tests.support.arena import (
    BASELINE,
    ROUNDS,
    old_line,
    published_benchmark,
    their_controlled,
    their_features,
    their_rows,
)

Published = tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_benchmark(tmp_path_factory.mktemp("arena"))


def test_the_fit_is_the_references(published: Published) -> None:
    """The medians of the bootstraps of the rows, with its z-scored features and the same rows drawn."""
    _, judgments, answers = published
    rows = their_rows(judgments)
    style = their_features(rows, answers)
    drawn = np.random.default_rng(2).integers(len(rows), size=(ROUNDS, len(rows)))
    indicators, names = one_hot([model for _, model, _ in rows])
    design = np.hstack([indicators, style.numpy().astype(np.float64)])
    weights = np.stack([np.bincount(one, minlength=len(rows)) for one in drawn]).astype(np.float64)
    found = fit(design, np.array([score for *_, score in rows]), weights, np.full(design.shape[1], 1e-9))
    ours = dict(zip(names, np.median(1 / (1 + np.exp(-found[:, : len(names)])), axis=0), strict=True))
    theirs = their_controlled(rows, style, drawn)
    assert set(ours) == {"dpo", "ppo", "tiny"} and theirs[BASELINE][0] == 0.5
    assert {name: 100 * value for name, value in ours.items()} == pytest.approx(
        {name: 100 * theirs[name][0] for name in ours}, abs=0.1
    )


def test_judgments_of_the_older_format_are_scored(published: Published) -> None:
    _, judgments, _ = published
    ours = [to_judgment(old_line(row)) for row in judgments]
    assert {j.baseline for j in ours} == {"gpt-4-0314"} and {j.category for j in ours} == {"arena-hard-v0.1"}
    assert boards(ours, None, How(resamples=10, max_failed=0.5))


def test_a_boards_scores_are_the_means_of_the_references_rows(published: Published) -> None:
    folder, judgments, _ = published
    judged = read_judgments(folders(folder).judgments)
    styles = read_styles(folder / "model_answer")
    (ours,) = boards(judged, styles, How(("length", "markdown"), resamples=100))
    assert [row.model for row in ours.standings] == ["ppo", "dpo", "tiny"]
    for mine in ours.standings:
        rows = [score for _, model, score in their_rows(judgments) if model == mine.model]
        # but for the games the reference leaves out
        assert mine.score.value == pytest.approx(np.mean(rows), abs=0.005)
        assert mine.controlled is not None
        assert mine.questions == 100 and 0 <= mine.swap_consistency <= 1 and mine.tokens is not None
    assert json.loads(as_json([ours]))[0]["standings"][0]["score"]["value"] == ours.standings[0].score.value
    with pytest.raises(ValueError, match="needs the answer of"):
        boards(judged, {}, How(("length",), resamples=100))


def test_labels_in_lower_case_are_labels() -> None:
    assert label_of("b>>a") == "B>>A"
