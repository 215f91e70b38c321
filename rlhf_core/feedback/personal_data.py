"""Replaces email addresses, phone numbers, card numbers and IBANs in texts, using presidio's pattern
recognisers. Torch-free.

Names and addresses of people are not found, because that would need a language model. Presidio and its
imports take seconds to load, so they are loaded only when a text contains the characters of such data. Digits
alone count as a phone number only with a leading 0 or +; otherwise they are arithmetic.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from rlhf_core.system.machine import MachineLacks

SUSPECTS = {  # patterns that a text must contain for a recogniser to find something
    "EMAIL_ADDRESS": re.compile(r"@\b"),
    "CREDIT_CARD": re.compile(r"(?:\d[ -]?){11,}\d"),
    "IBAN_CODE": re.compile(r"\b[A-Za-z]{2}[ -]?\d{2}(?:[ -]?[A-Za-z0-9]){9}"),
    "PHONE_NUMBER": re.compile(r"(?:\+\d|\(\d|\d)(?:[^\w\n]{0,3}\d){6,}"),
}


LOCAL = 64
DOMAIN = 255  # maximum characters before and after the @ of an email address (RFC 5321, 4.5.3.1)
BEFORE = re.compile(r"[^\s@\"(),:;<>\[\]\\]+\Z")  # characters allowed before and after the @
AFTER = re.compile(r"[^\s@!-,/:-?\[-^`{-~]*")
MARGIN = 64
PIECE = 2048  # characters around a suspected number; a recogniser gets at most this many at once


class Masked(NamedTuple):
    """Texts without personal data, and the number of replaced pieces of each kind."""

    texts: list[str]
    found: Counter[str]


def masked(texts: list[str]) -> Masked:
    """Returns the texts with each piece of personal data replaced by its kind, such as `<EMAIL_ADDRESS>`.
    Raises MachineLacks when presidio is needed but not installed."""
    found: Counter[str] = Counter()
    return Masked([_masked(text, found) for text in texts], found)


class _Span(NamedTuple):
    """A piece of personal data: its place in the text and the recogniser's confidence."""

    start: int
    end: int
    score: float
    kind: str


def _masked(text: str, found: Counter[str]) -> str:
    spans = [span for kind in SUSPECTS for span in _spans(kind, text)]
    kept: list[_Span] = []  # sorted by place
    # if two overlap, the more certain one is kept
    for span in sorted(spans, key=lambda span: (-span.score, span.start)):
        place = bisect(kept, span.start, key=lambda other: other.start)
        if (not place or kept[place - 1].end <= span.start) and (
            place == len(kept) or kept[place].start >= span.end
        ):
            kept.insert(place, span)
    parts = []
    end = 0
    for span in kept:
        found[span.kind] += 1
        parts += [text[end : span.start], f"<{span.kind}>"]
        end = span.end
    return "".join([*parts, text[end:]])


def _spans(kind: str, text: str) -> Iterator[_Span]:
    """Yields the findings of a kind's recogniser. The recogniser gets small pieces, since its patterns take
    quadratic time or more on long texts."""
    for start, end, first, last in (
        _mail_windows(text) if kind == "EMAIL_ADDRESS" else _pieces(SUSPECTS[kind], text)
    ):
        for found in _recognisers()[kind].analyze(text[start:end], [kind], None):
            span = _Span(start + found.start, start + found.end, found.score, kind)
            if first <= span.start < last and (
                kind != "PHONE_NUMBER" or _is_phone(text, span.start, span.end)
            ):
                yield span


class _Window(NamedTuple):
    """A part of a text given to a recogniser. Only spans that start in [`first`, `last`) count."""

    start: int
    end: int
    first: int
    last: int


def _mail_windows(text: str) -> Iterator[_Window]:
    """Yields windows with the characters around each @ that can belong to its email address. A character is
    in at most two windows."""
    for match in SUSPECTS["EMAIL_ADDRESS"].finditer(text):
        at = match.start()
        before = BEFORE.search(text[max(0, at - LOCAL) : at])
        after = AFTER.match(text, at + 1, at + 1 + DOMAIN)
        if before and after:
            start = at - len(before[0])
            yield _Window(start, after.end(), start, at)


def _pieces(suspect: re.Pattern[str], text: str) -> Iterator[_Window]:
    """Yields the parts of a text that match `suspect`, extended by MARGIN before and after, in pieces that
    overlap by two margins."""
    parts: list[list[int]] = []
    for match in suspect.finditer(text):
        start = max(0, match.start() - MARGIN)
        end = min(len(text), match.end() + MARGIN)
        if parts and start <= parts[-1][1]:
            parts[-1][1] = end
        else:
            parts.append([start, end])
    for begin, stop in parts:
        for start in range(begin, max(begin + 1, stop - 2 * MARGIN), PIECE - 2 * MARGIN):
            end = min(stop, start + PIECE)
            yield _Window(
                start, end, start if start == begin else start + MARGIN, end if end == stop else end - MARGIN
            )


def _is_phone(text: str, start: int, end: int) -> bool:
    """Returns whether a number that presidio found is written like a phone number and is not part of a longer
    or decimal number."""
    number = text[start:end]
    before = text[max(0, start - 2) : start]
    after = text[end : end + 2]
    part = re.search(r"\d[.,]?$", before) or re.match(r"[.,]?\d", after)
    return not part and (not number.isdigit() or number.startswith("0"))


@cache
def _recognisers() -> dict[str, Any]:
    logging.getLogger("presidio-analyzer").setLevel(logging.ERROR)
    try:
        from presidio_analyzer import predefined_recognizers as presidio
        from tldextract import TLDExtract
    except ImportError:
        raise MachineLacks(
            "personal data is found by the package presidio-analyzer, which is not installed: pip install"
            " alignflow[feedback]"
        ) from None
    domains = TLDExtract(suffix_list_urls=())  # the packaged list; presidio itself downloads one

    class Email(presidio.EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            return bool(domains(pattern_text.rpartition("@")[2]).top_domain_under_public_suffix)

    cards = presidio.CreditCardRecognizer()
    ibans = presidio.IbanRecognizer()
    phones = presidio.PhoneRecognizer()
    return {"EMAIL_ADDRESS": Email(), "CREDIT_CARD": cards, "IBAN_CODE": ibans, "PHONE_NUMBER": phones}
