"""Defines pairs of answers and the labels that annotators give them. Each is one line of a file
(docs/reference/data-formats.md)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal, TypeVar

from rlhf_core.data.labels import VERDICTS, LabelLine
from rlhf_core.records import Frozen, Label
from rlhf_core.system.files import digest

Side = Literal["a", "b"]  # one of the two answers
LABELS = VERDICTS


class ComparedPair(Frozen):
    """Two answers to one prompt. `uid`: uid of the question; `model_...`: the model that answered, None if
    unknown; `source`: the file or run that the pair comes from.

    The texts contain no unpaired surrogates; code that reads texts from elsewhere replaces them with U+FFFD.
    """

    uid: str
    prompt: tuple[dict[str, str], ...]
    answer_a: str
    answer_b: str
    model_a: str | None = None
    model_b: str | None = None
    source: str = ""

    @cached_property
    def key(self) -> str:
        """Returns a key that is the same for all labels of this pair, regardless of the file that the pair
        was read from."""
        return digest([self.uid, list(self.prompt), self.answer_a, self.answer_b, self.model_a, self.model_b])


class HumanLabel(ComparedPair):
    """One annotator's verdict on a pair, None if it was skipped. `at`: ISO time, UTC; `seconds`: time from
    display to verdict.

    The verdict is about `answer_a` and `answer_b`, whichever was shown first (on the left). `repeat_of`: the
    id of this annotator's first label of the pair. A line with `undone` withdraws the label with that id; its
    own verdict is None.
    """

    id: str
    verdict: Label | None
    shown_first: Side
    annotator: str
    at: str
    seconds: float
    note: str | None = None
    repeat_of: str | None = None
    undone: str | None = None

    @property
    def strength(self) -> int:
        """Returns the index of the verdict in LABELS, from 0 (A is much better) to 4 (B is much better). Must
        not be used for a skipped label."""
        assert self.verdict is not None, "a skipped pair has no verdict"
        return LABELS.index(self.verdict)

    @property
    def winner(self) -> int:
        """Returns 0 for A, 1 for a tie, 2 for B."""
        return (self.strength > 1) + (self.strength > 2)


AnyLabel = TypeVar("AnyLabel", bound=HumanLabel | LabelLine)


def in_force(labels: Iterable[AnyLabel]) -> list[AnyLabel]:
    """Returns the labels that were not withdrawn, in their order, including skipped labels."""
    rows = list(labels)
    undone = {row.undone for row in rows}
    return [row for row in rows if row.undone is None and row.id not in undone]
