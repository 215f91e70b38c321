"""Computes the leaderboard of a folder of judgments, without any model, for `alignflow leaderboard FOLDER`.

One board for each judge, category and baseline: arena score with our interval (resampled by question), the style-controlled score if the
answers are known, and optionally the reference's numbers (`scores/arena_hard.py`). Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from evaluation.scores.arena_files import V01
from evaluation.scores.arena_hard import (
    REFERENCE_ROUNDS,
    Estimate,
    Styles,
    controlled,
    question_rows,
    reference_controlled,
    reference_raw,
    reference_rows,
    seeded_indices,
)
from evaluation.scores.scoring import arena_clusters, share_interval, swap_consistency
from evaluation.scores.style import Control
from rlhf_core.records import Judgment

Method = Literal["ours", "reference"]


class Standing(NamedTuple):
    """One model. All scores in [0, 1] against the board's baseline; `tokens` is the mean length of its answers."""

    model: str
    score: Estimate
    controlled: Estimate | None
    questions: int
    failed: int
    swap_consistency: float
    tokens: float | None


class Board(NamedTuple):
    """Models, best first. `effects`: change of the log-odds of winning by a style difference of typical size."""

    judge: str
    category: str
    baseline: str
    method: Method
    standings: list[Standing]
    effects: dict[str, Estimate]


class How(NamedTuple):
    """How boards are computed. "ours": 95 % intervals over `rounds` question bootstraps; "reference": arena-hard-auto's statistics, its
    bootstraps seeded. `controls`: styles to control for. `max_failed`: share of a board's games without a verdict."""

    controls: Sequence[Control] = ()
    method: Method = "ours"
    rounds: int = 1000
    seed: int = 0
    max_failed: float = 0.02


def boards(judgments: Sequence[Judgment], styles: Styles | None, how: How) -> list[Board]:
    """Returns all boards. `styles` None: no style control. Raises ValueError when too many games of a board have no verdict."""
    groups: dict[tuple[str, str, str], list[Judgment]] = {}
    for judgment in judgments:
        groups.setdefault((judgment.judge, judgment.category, judgment.baseline), []).append(judgment)
    return [_board(groups[key], styles, how) for key in sorted(groups)]


def as_json(found: Sequence[Board]) -> str:
    """Returns the boards as JSON; estimates are {"value", "low", "high"}."""

    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {name: plain(item) for name, item in value._asdict().items()}
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps([plain(board) for board in found], indent=2, ensure_ascii=False) + "\n"


def _board(judgments: Sequence[Judgment], styles: Styles | None, how: How) -> Board:
    judge, category, baseline = judgments[0].judge, judgments[0].category, judgments[0].baseline
    failed, games = sum(game.score is None for j in judgments for game in j.games), 2 * len(judgments)
    if failed > how.max_failed * games:
        raise ValueError(
            f"judge {judge}, category {category}: {failed} of {games} games have no verdict, more than --max-failed {how.max_failed:g} "
            f"allows: judge those again, or allow more and read the score with care"
        )
    by_model: dict[str, list[Judgment]] = {}
    for judgment in judgments:
        by_model.setdefault(judgment.model, []).append(judgment)
    if how.method == "reference":
        scores, held, effects = _reference(judgments, styles, how)
    else:
        scores, held, effects = _ours(by_model, styles, how)
    standings = [
        Standing(
            model,
            scores[model],
            held.get(model),
            sum(judgment.score is not None for judgment in ours),
            sum(game.score is None for judgment in ours for game in judgment.games),
            swap_consistency(ours),
            sum(styles[model, j.uid].tokens for j in ours) / len(ours) if styles and all((model, j.uid) in styles for j in ours) else None,
        )
        for model, ours in by_model.items()
    ]
    standings.sort(key=lambda row: (-row.score.value, row.model))
    return Board(judge, category, baseline, how.method, standings, effects)


Scores = tuple[dict[str, Estimate], dict[str, Estimate], dict[str, Estimate]]  # raw, style-controlled, effects


def _ours(by_model: dict[str, list[Judgment]], styles: Styles | None, how: How) -> Scores:
    raw = {}
    for model, judgments in by_model.items():
        clusters = arena_clusters(judgments)
        raw[model] = Estimate(clusters.score, *share_interval(clusters, how.rounds, how.seed))
    if styles is None or not how.controls:
        return raw, {}, {}
    every = [judgment for judgments in by_model.values() for judgment in judgments]
    return raw, *controlled(question_rows(every, styles, arena=True), how.controls, how.rounds, how.seed)


def _reference(judgments: Sequence[Judgment], styles: Styles | None, how: How) -> Scores:
    if judgments[0].category == V01:
        raise ValueError(f"the reference's statistics are those of v2.0, and these judgments are of {V01}: leave --reference out")
    rows, raw = reference_rows(judgments, styles), {}
    for model in sorted(set(rows.models)):
        outcomes = rows.outcomes[[name == model for name in rows.models]]
        raw[model] = reference_raw(outcomes, seeded_indices(len(outcomes), REFERENCE_ROUNDS, how.seed))
    if styles is None or not how.controls:
        return raw, {}, {}
    return raw, *reference_controlled(rows, how.controls, seeded_indices(len(rows.outcomes), REFERENCE_ROUNDS, how.seed))
