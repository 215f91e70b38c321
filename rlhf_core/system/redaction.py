"""Removes passwords and signatures from texts that are shown: URLs in recipes and commands can hold them."""

from __future__ import annotations

import re


def without_passwords(text: str) -> str:
    """Returns a text with user names and passwords in its URLs replaced by ***."""
    return re.sub(r"://[^/@\s\"]+@", "://***@", text)


def public_address(text: str) -> str:
    """Returns a text with passwords, queries (which may hold a signature) and fragments of its URLs removed."""
    return re.sub(r"(://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", without_passwords(text))
