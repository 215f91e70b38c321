"""Expands shell variables: `$A`, `${A:-default}`, `${A[1]}`, `${A[@]}`. Executes nothing.

Variables that the script does not set, and all other expansions, stay as `$A` or `${...}`, so that the
caller can report them.
"""

from __future__ import annotations

import re

# name, index, :, operator, default
PARAMETER = re.compile(r"(\w+|[@*#?$!-])(?:\[(\d+|[@*])\])?(?:(:?)([-=])(.*))?", re.S)


class Variables(dict[str, list[str]]):
    """The words of the variables that a script has set, by name. Several words form an array."""

    def expand(self, body: str) -> str:
        """Returns the value of `${body}`, which for an array is its first word; `${body}` itself, or
        `$body`, if unknown."""
        match = PARAMETER.fullmatch(body)
        if match:
            name, index, colon, mark, default = match.groups()
            value = self._value(name, index)
            if mark and (value is None or (colon and not value)):
                value = self._default(default)
                if mark == "=":
                    self[name] = [value]
            if value is not None:
                return value
        return f"${body}" if re.fullmatch(r"\w+", body) else "${" + body + "}"

    def _value(self, name: str, index: str | None) -> str | None:
        words = self.get(name)
        if words is None:
            return None
        if index in ("@", "*"):
            return " ".join(words)
        at = int(index or 0)
        if at < len(words):
            return words[at]
        return None if index else ""

    def _default(self, text: str) -> str:
        """Expands `$A` and `${A...}` in a default, without its quotes."""
        text = re.sub(r"^(['\"])(.*)\1$", r"\2", text, flags=re.S)
        return re.sub(r"\$(?:\{([^{}]*)\}|(\w+))", lambda m: self.expand(m[1] or m[2] or ""), text)
