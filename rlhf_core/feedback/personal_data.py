"""Replaces mail addresses, phone numbers, card numbers and IBANs in texts, by presidio's pattern recognisers. Torch-free.

Names and addresses of people are not found: that takes a language model. Presidio and what it imports take seconds to load, so that is
left until a text has the characters of such data. Digits alone are a phone number only with a leading 0 or +: else they are arithmetic.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from rlhf_core.system.machine import MachineLacks

SUSPECTS = {  # what a text must hold for a recogniser to find something
    "EMAIL_ADDRESS": re.compile(r"@\b"),
    "CREDIT_CARD": re.compile(r"(?:\d[ -]?){11,}\d"),
    "IBAN_CODE": re.compile(r"\b[A-Za-z]{2}[ -]?\d{2}(?:[ -]?[A-Za-z0-9]){9}"),
    "PHONE_NUMBER": re.compile(r"(?:\+\d|\(\d|\d)(?:[^\w\n]{0,3}\d){6,}"),
}


class Masked(NamedTuple):
    """Texts without personal data, and how many pieces of each kind were replaced."""

    texts: list[str]
    found: Counter[str]


def masked(texts: list[str]) -> Masked:
    """Replaces each piece of personal data by its kind, as `<EMAIL_ADDRESS>`. Raises MachineLacks when presidio is needed and absent."""
    found: Counter[str] = Counter()
    return Masked([_masked(text, found) for text in texts], found)


def _masked(text: str, found: Counter[str]) -> str:
    kinds = [kind for kind, suspect in SUSPECTS.items() if suspect.search(text)]
    spans = [span for kind in kinds for span in _spans(kind, text)]
    spans.sort(key=lambda span: (-span.score, span.start))
    kept: list[Any] = []
    for span in spans:  # of two that overlap the more certain one
        if all(span.end <= other.start or span.start >= other.end for other in kept):
            kept.append(span)
    for span in sorted(kept, key=lambda span: -span.start):
        found[span.entity_type] += 1
        text = f"{text[: span.start]}<{span.entity_type}>{text[span.end :]}"
    return text


def _spans(kind: str, text: str) -> list[Any]:
    spans = _recognisers()[kind].analyze(text, [kind], None)
    return [span for span in spans if kind != "PHONE_NUMBER" or _is_phone(text, span.start, span.end)]


def _is_phone(text: str, start: int, end: int) -> bool:
    """Whether a number that presidio found is written as a phone number, and is no part of a longer or a decimal one."""
    number, before, after = text[start:end], text[max(0, start - 2) : start], text[end : end + 2]
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
            "personal data is found by the package presidio-analyzer, which is not installed: pip install alignflow[feedback]"
        ) from None
    domains = TLDExtract(suffix_list_urls=())  # the list in the package: presidio's own call downloads one

    class Email(presidio.EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            return bool(domains(pattern_text.rpartition("@")[2]).top_domain_under_public_suffix)

    cards, ibans, phones = presidio.CreditCardRecognizer(), presidio.IbanRecognizer(), presidio.PhoneRecognizer()
    return {"EMAIL_ADDRESS": Email(), "CREDIT_CARD": cards, "IBAN_CODE": ibans, "PHONE_NUMBER": phones}
