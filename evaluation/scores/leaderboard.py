"""Computes the leaderboard of a folder of judgments, without any model, for `alignflow leaderboard FOLDER`.

Each judge, category and baseline has a board. It has the arena score, with our interval over questions, and
the style-controlled score if the answers are known. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from evaluation.scores.arena_hard import IntervalEstimate, Styles, controlled, question_rows
from evaluation.scores.scoring import arena_sums, rate_interval, swap_consistency
from evaluation.scores.style import Control
from rlhf_core.records import Judgment


class Standing(NamedTuple):
    """One model's scores, all in [0, 1] and against the board's baseline. `tokens`: the mean length of its
    answers."""

    model: str
    score: IntervalEstimate
    controlled: IntervalEstimate | None
    questions: int
    failed: int
    swap_consistency: float
    tokens: float | None


class Board(NamedTuple):
    """The models of a board, best first. `effects`: the change in the log-odds of winning for a style
    difference of typical size."""

    judge: str
    category: str
    baseline: str
    standings: list[Standing]
    effects: dict[str, IntervalEstimate]


class How(NamedTuple):
    """Settings for computing boards. `controls`: styles to control for; `resamples` of the questions give the
    95 % intervals of style control; `max_failed`: the largest allowed fraction of a board's games without a
    verdict."""

    controls: Sequence[Control] = ()
    resamples: int = 1000
    seed: int = 0
    max_failed: float = 0.02


def boards(judgments: Sequence[Judgment], styles: Styles | None, how: How) -> list[Board]:
    """Returns all boards. If `styles` is None, there is no style control. Raises ValueError when too many
    games of a board have no verdict."""
    groups: dict[tuple[str, str, str], list[Judgment]] = {}
    for judgment in judgments:
        groups.setdefault((judgment.judge, judgment.category, judgment.baseline), []).append(judgment)
    return [_board(groups[key], styles, how) for key in sorted(groups)]


def as_json(found: Sequence[Board]) -> str:
    """Returns the boards as JSON, with estimates as {"value", "low", "high"}."""

    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {name: plain(item) for name, item in value._asdict().items()}
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps([plain(board) for board in found], indent=2, ensure_ascii=False) + "\n"


def _board(judgments: Sequence[Judgment], styles: Styles | None, how: How) -> Board:
    judge = judgments[0].judge
    category = judgments[0].category
    baseline = judgments[0].baseline
    failed = sum(game.score is None for j in judgments for game in j.games)
    games = 2 * len(judgments)
    if failed > how.max_failed * games:
        raise ValueError(
            f"judge {judge}, category {category}: {failed} of {games} games have no verdict, more than"
            f" --max-failed {how.max_failed:g} allows: judge those again, or allow more and read the score"
            " with care"
        )
    by_model: dict[str, list[Judgment]] = {}
    for judgment in judgments:
        by_model.setdefault(judgment.model, []).append(judgment)
    scores = {}
    for model, ours in by_model.items():
        sums = arena_sums(ours)
        scores[model] = IntervalEstimate(sums.score, *rate_interval(sums))
    held: dict[str, IntervalEstimate] = {}
    effects: dict[str, IntervalEstimate] = {}
    if styles is not None and how.controls:
        every = [judgment for ours in by_model.values() for judgment in ours]
        held, effects = controlled(
            question_rows(every, styles, arena=True), how.controls, how.resamples, how.seed
        )
    standings = [
        Standing(
            model,
            scores[model],
            held.get(model),
            sum(judgment.score is not None for judgment in ours),
            sum(game.score is None for judgment in ours for game in judgment.games),
            swap_consistency(ours),
            (
                sum(styles[model, j.uid].tokens for j in ours) / len(ours)
                if styles and all((model, j.uid) in styles for j in ours)
                else None
            ),
        )
        for model, ours in by_model.items()
    ]
    standings.sort(key=lambda row: (-row.score.value, row.model))
    return Board(judge, category, baseline, standings, effects)
