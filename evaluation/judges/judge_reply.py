"""Reads the verdict in a judge's reply.

A verdict is one of the five labels, or a mirrored form, in double brackets; single brackets are a fallback.
The last one counts, as in Arena-Hard. Blanks inside the brackets are allowed. `[A]` and `A>>>B` are not
verdicts.

Text that the judge only quotes is not its verdict: text in ``` fences, in lines that begin with >, in
double quotation marks, and text that occurs in one of the answers. An answer may have planted a label, so a
label alone proves nothing: the text beside it, CONTEXT characters before or after it, decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evaluation.scores.arena_files import label_of
from rlhf_core.records import Label

CONTEXT = 12  # characters beside a label, with each run of white space reduced to one blank
NEAR = 200  # characters beside a label that are inspected
NO_VERDICT = "the reply holds no verdict of its own"
CUT = "the reply was cut by the limit of its length"
CONTRADICTION = "the reply holds verdicts that differ"

_LABEL = re.compile(r"(\[\[?)([AB<>= \t]+)(\]\]?)", re.IGNORECASE)
_QUOTED = re.compile(
    r"```.*?(?:```|\Z)"  # a fence, up to the end if it is not closed
    r"|^[ \t]*>.*?$"  # a quoted line
    r'|"[^"\n]*"'
    r"|[\u201c\u201e][^\u201c\u201d\n]*[\u201c\u201d]",
    re.DOTALL | re.MULTILINE,
)


class JudgeVerdict(NamedTuple):
    """The label of a reply; None and the problem if there is no valid one."""

    label: Label | None
    problem: str = ""


class _Found(NamedTuple):
    """A label in a text, the position of its brackets, and whether they are double."""

    label: Label
    start: int
    end: int
    double: bool


def read_verdict(reply: str, answers: Sequence[str], cut: bool = False) -> JudgeVerdict:
    """Returns a judge's verdict on these answers. `cut`: the length limit ended the reply.

    A reply contradicts itself when its last label is in single brackets and differs from the last one in
    double brackets. If an answer contains a label, a label in the reply may only mention it: the reply must
    then end with its verdict and contain no different label.
    """
    if cut:
        return JudgeVerdict(None, CUT)
    quotations = [match.span() for match in _QUOTED.finditer(reply)]
    sources = [_flat(answer) for answer in answers]
    own = [
        found
        for found in _labels(reply)
        if not any(start <= found.start < end for start, end in quotations)
        and not _occurs(reply, found, sources)
    ]
    if not own:
        return JudgeVerdict(None, NO_VERDICT)
    doubles = [found for found in own if found.double]
    label = (doubles or own)[-1].label
    planted = any(True for answer in answers for _ in _labels(answer))
    if own[-1].label != label or (planted and len({found.label for found in own}) > 1):
        return JudgeVerdict(None, CONTRADICTION)
    if planted and len(reply[own[-1].end :].strip()) > CONTEXT:
        return JudgeVerdict(None, NO_VERDICT)
    return JudgeVerdict(label)


def _labels(text: str) -> Iterator[_Found]:
    """Yields the labels of a text, in order."""
    for match in _LABEL.finditer(text):
        label = label_of(re.sub(r"[ \t]", "", match[2]))
        if label is not None:
            yield _Found(label, match.start(), match.end(), len(match[1]) == len(match[3]) == 2)


def _occurs(reply: str, found: _Found, sources: Sequence[str]) -> bool:
    """Returns whether the label together with the text before or after it occurs in one of the answers."""
    label = reply[found.start : found.end]
    before = _flat(reply[max(0, found.start - NEAR) : found.start])
    after = _flat(reply[found.end : found.end + NEAR])
    contexts = []
    if len(before.strip()) >= CONTEXT:
        contexts.append(_flat(before[-CONTEXT:] + label))
    if len(after.strip()) >= CONTEXT:
        contexts.append(_flat(label + after[:CONTEXT]))
    return any(context in source for context in contexts for source in sources)


def _flat(text: str) -> str:
    """Returns a text in capitals with each run of white space reduced to one blank."""
    return re.sub(r"\s+", " ", text).upper()
