"""Expands shell variables: `$A`, `${A:-default}`, `${A[1]}`, `${A[@]}`. Executes nothing.

Variables that the script does not set, and all other expansions, stay in the text as `$A` or `${...}`, so that the caller can report them.
"""

from __future__ import annotations

import re

PARAMETER = re.compile(r"(\w+|[@*#?$!-])(?:\[(\d+|[@*])\])?(?:(:?)([-=])(.*))?", re.S)  # name, index, :, operator, default


class Variables:
    """The variables that a script has set. An array is a list of words."""

    def __init__(self) -> None:
        self.values: dict[str, str | list[str]] = {}

    def text(self, name: str) -> str | None:
        """Returns the value of a variable, of an array its first word; None when it is not set."""
        value = self.values.get(name)
        return value if isinstance(value, str) or value is None else next(iter(value), "")

    def words(self, name: str) -> list[str] | None:
        """Returns the words of an array, or a variable as one word; None when it is not set."""
        value = self.values.get(name)
        return [value] if isinstance(value, str) else value

    def expand(self, body: str) -> str:
        """Returns the value of `${body}`; `${body}` itself, or `$body`, when it is not known."""
        match = PARAMETER.fullmatch(body)
        value = None
        if match:
            name, index, colon, mark, default = match.groups()
            value = self._value(name, index)
            if mark and (value is None or (colon and not value)):
                value = self._default(default)
                if mark == "=":
                    self.values[name] = value
        if value is not None:
            return value
        return f"${body}" if re.fullmatch(r"\w+", body) else "${" + body + "}"

    def _value(self, name: str, index: str | None) -> str | None:
        words = self.words(name)
        if index is None or words is None:
            return self.text(name)
        if index in "@*":
            return " ".join(words)
        return words[int(index)] if int(index) < len(words) else None

    def _default(self, text: str) -> str:
        """Expands `$A` and `${A...}` in the text of a default, without its quotes."""
        text = re.sub(r"^(['\"])(.*)\1$", r"\2", text, flags=re.S)
        return re.sub(r"\$(?:\{([^{}]*)\}|(\w+))", lambda m: self.expand(m[1] or m[2] or ""), text)
