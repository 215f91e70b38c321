"""Loads anchors: pairs of answers with past verdicts, which a judge then judges again. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config import Data, Source
from rlhf_core.data.questions import Question, to_question
from rlhf_core.data.rows.mixture import load_rows

POINTS = {"A": 0.0, "tie": 0.5, "B": 1.0}  # points of answer B


class AnchorPairs(NamedTuple):
    """Holds anchors: N questions, two answers to each, and the points that past verdicts award to answer B,
    (N,)."""

    questions: list[Question]
    answers: dict[str, list[str]]
    points: NDArray[np.float64]


def load_anchors(source: Source, seed: int) -> AnchorPairs:
    """Reads the anchors. Raises ValueError, naming the row, if a prompt, answer or verdict is missing."""
    rows = load_rows(Data(sources=(source,)), seed)
    questions = [
        to_question({**row, "uid": f"anchor {number}"}, source, number) for number, row in enumerate(rows, 1)
    ]
    return AnchorPairs(
        questions,
        {
            side: [
                _text(row, question.where, f"answer_{side}")
                for row, question in zip(rows, questions, strict=True)
            ]
            for side in "ab"
        },
        np.array([_points(row, question.where) for row, question in zip(rows, questions, strict=True)]),
    )


def _text(row: Mapping[str, Any], where: str, column: str) -> str:
    if not isinstance(row.get(column), str):
        raise ValueError(
            f"{where}: an anchor needs the text column {column!r}; its columns are {', '.join(row)}: add it"
        )
    return str(row[column])


def _points(row: Mapping[str, Any], where: str) -> float:
    if row.get("verdict") not in POINTS:
        raise ValueError(
            f"{where}: the verdict of an anchor is A, B or tie, and here it is {row.get('verdict')!r}:"
            " correct it"
        )
    return POINTS[row["verdict"]]
