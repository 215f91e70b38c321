"""Reads a judge's verdict, which is the last marker in its reply, such as [[A>B]] or [[7]].

Text that the judge only quotes is not its verdict: text in ``` fences, in lines that begin with > or in
double quotation marks, and text that occurs in one of the judged texts. Because a judged text may contain a
planted marker, a marker alone does not count as such text; CONTEXT characters before or after it must occur
there too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

CONTEXT = 12  # characters beside a marker, with each run of white space reduced to one blank
NEAR = 200  # characters beside a marker that are inspected
NO_VERDICT = "the reply holds no verdict of its own"
CUT = "the reply was cut by the limit of its length"
CONTRADICTION = "the reply holds verdicts that differ"

_QUOTED = re.compile(
    r"```.*?(?:```|\Z)"  # a fence, up to the end of the text if it is not closed
    r"|^[ \t]*>.*?$"  # a quoted line
    r'|"[^"\n]*"'
    r"|[\u201c\u201e][^\u201c\u201d\n]*[\u201c\u201d]",
    re.DOTALL | re.MULTILINE,
)
Value = TypeVar("Value")


class Marker(NamedTuple, Generic[Value]):
    """The value of a marker, its place in the text, and whether its brackets are double."""

    value: Value
    start: int
    end: int
    double: bool = True


class MarkedReply(NamedTuple, Generic[Value]):
    """The value of a reply's verdict, or None and the problem if the reply has no valid verdict."""

    value: Value | None
    problem: str = ""


def read_marked(
    reply: str,
    texts: Sequence[str],
    markers: Callable[[str], Iterable[Marker[Value]]],
    cut: bool = False,
) -> MarkedReply[Value]:
    """Returns a judge's verdict on these texts. `markers`: finds the markers in a text, in order. `cut`:
    whether the length limit ended the reply.

    A reply contradicts itself when its last marker is in single brackets and differs from the last one in
    double brackets. If a judged text contains a marker, a marker in the reply may merely quote it, so the
    reply must then end with its verdict and contain no different marker.
    """
    if cut:
        return MarkedReply(None, CUT)
    quotations = [match.span() for match in _QUOTED.finditer(reply)]
    sources = [_flat(text) for text in texts]
    own = [
        found
        for found in markers(reply)
        if not any(start <= found.start < end for start, end in quotations)
        and not _occurs(reply, found, sources)
    ]
    if not own:
        return MarkedReply(None, NO_VERDICT)
    doubles = [found for found in own if found.double]
    value = (doubles or own)[-1].value
    planted = any(True for text in texts for _ in markers(text))
    if own[-1].value != value or (planted and len({found.value for found in own}) > 1):
        return MarkedReply(None, CONTRADICTION)
    if planted and len(reply[own[-1].end :].strip()) > CONTEXT:
        return MarkedReply(None, NO_VERDICT)
    return MarkedReply(value)


def _occurs(reply: str, found: Marker[Value], sources: Sequence[str]) -> bool:
    """Returns whether the marker occurs, together with the text before or after it, in one of the texts."""
    marker = reply[found.start : found.end]
    before = _flat(reply[max(0, found.start - NEAR) : found.start])
    after = _flat(reply[found.end : found.end + NEAR])
    contexts = []
    if len(before.strip()) >= CONTEXT:
        contexts.append(_flat(before[-CONTEXT:] + marker))
    if len(after.strip()) >= CONTEXT:
        contexts.append(_flat(marker + after[:CONTEXT]))
    return any(context in source for context in contexts for source in sources)


def _flat(text: str) -> str:
    """Returns a text in upper case with each run of white space reduced to one blank."""
    return re.sub(r"\s+", " ", text).upper()
