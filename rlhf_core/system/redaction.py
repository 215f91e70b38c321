"""Removes control characters, and passwords and signatures in URLs, from text before it is shown."""

from __future__ import annotations

import re

# includes marks that change text direction
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_passwords(text: str) -> str:
    """Returns `text` with user names and passwords in URLs replaced by ***."""
    return re.sub(r"://[^/@\s\"]+@", "://***@", text)


def public_address(text: str) -> str:
    """Returns `text` without the passwords, queries (which may hold signatures) and fragments of its URLs."""
    return re.sub(r"(://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", without_passwords(text))


def plain(text: object) -> str:
    """Returns `text` with control characters (as in terminal escape codes) and text-direction marks
    replaced."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text))
