"""Reads the verdict of a judge that compares two answers, by the rules of `marked_reply.py`.

A verdict is one of the five labels, or the mirrored form of a label, in double brackets; single brackets are
a fallback. The last verdict counts, as in Arena-Hard. Blanks inside the brackets are allowed. `[A]` and
`A>>>B` are not verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from rlhf_core.judging.marked_reply import Marker, read_marked
from rlhf_core.records import POINTS, Label

MIRRORED: dict[str, Label] = {"B<<A": "A>>B", "B<A": "A>B", "B=A": "A=B", "A<B": "B>A", "A<<B": "B>>A"}
_LABEL = re.compile(r"(\[\[?)([AB<>= \t]+)(\]\]?)", re.IGNORECASE)


class JudgeVerdict(NamedTuple):
    """The label of a reply, or None and the problem if the reply has no valid label."""

    label: Label | None
    problem: str = ""


def read_verdict(reply: str, answers: Sequence[str], cut: bool = False) -> JudgeVerdict:
    """Returns a judge's verdict on these answers. `cut`: whether the length limit ended the reply."""
    return JudgeVerdict(*read_marked(reply, answers, _labels, cut))


def label_of(score: Any) -> Label | None:
    """Returns which of the five labels `score` corresponds to, even if it is mirrored or in lower case; None
    for any other text."""
    label = MIRRORED.get(score.upper(), score.upper()) if isinstance(score, str) else None
    return cast(Label, label) if label in POINTS else None


def _labels(text: str) -> Iterator[Marker[Label]]:
    """Yields the labels of a text, in order."""
    for match in _LABEL.finditer(text):
        label = label_of(re.sub(r"[ \t]", "", match[2]))
        if label is not None:
            yield Marker(label, match.start(), match.end(), len(match[1]) == len(match[3]) == 2)
