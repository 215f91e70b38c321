"""Removes passwords and signatures from texts that are shown, as URLs can hold them, and control
characters."""

from __future__ import annotations

import re

# and marks that turn the direction of text
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def without_passwords(text: str) -> str:
    """Returns a text with user names and passwords in its URLs replaced by ***."""
    return re.sub(r"://[^/@\s\"]+@", "://***@", text)


def public_address(text: str) -> str:
    """Returns a text with passwords, queries (which may hold a signature) and fragments of its URLs
    removed."""
    return re.sub(r"(://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", without_passwords(text))


def plain(text: object) -> str:
    """Returns a text without control characters, for terminals' escape codes, and marks that turn the
    direction of text."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text))
