"""What of a text may be shown: URLs in recipes can hold passwords."""

from __future__ import annotations

import re


def without_passwords(text: str) -> str:
    """Text without the passwords inside its URLs."""
    return re.sub(r"://[^/@\s\"]+@", "://***@", text)
