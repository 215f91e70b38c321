"""Expands shell variables: `$A`, `${A:-default}`, `${A##*/}`, `${A[@]}`, `$((A * 2))`. Executes nothing.

Variables that the script does not set, and command substitutions, stay in the text as `$A`, so that the caller can report them.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

NAME = re.compile(r"[A-Za-z_]\w*")
PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]]*\])?(?:(:?)([-=+?]))?(.*)", re.S)  # name, index, :, operator, rest
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),  # a shell rounds towards zero
    ast.Mod: lambda left, right: int(math.fmod(left, right)),
}


class Variables:
    """The variables that a script has set. An array is a list of words."""

    def __init__(self) -> None:
        self.values: dict[str, str | list[str]] = {}

    def text(self, name: str) -> str | None:
        """Returns the value of a variable, of an array its first word; None when it is not set."""
        value = self.values.get(name)
        return value if isinstance(value, str) or value is None else next(iter(value), "")

    def words(self, body: str) -> list[str] | None:
        """Returns the words of `NAME[@]` or `NAME[*]`; None when that is not set or `body` is something else."""
        name, bracket, index = body.partition("[")
        value = self.values.get(name) if bracket + index in ("[@]", "[*]") else None
        return [value] if isinstance(value, str) else value

    def expand(self, body: str) -> str:
        """Returns the value of `${body}`; `${body}` itself, or `$body`, when it is not known."""
        whole = "${" + body + "}"
        match = PARAMETER.fullmatch(body)
        if not match:
            return whole
        name, index, colon, mark, rest = match.groups()
        value = self._value(name, index)
        unset = not value if colon else value is None
        match mark:
            case "-" | "=":
                default = self.simple(rest)
                if unset and mark == "=":
                    self.values[name] = default
                return default if unset else value or ""
            case "+":
                return "" if unset else self.simple(rest)
            case "?":
                return whole if unset else value or ""
        if value is None:
            return f"${name}" if not rest and re.match(r"\w", name) else whole
        return _cut(value, rest, whole) if rest else value

    def _value(self, name: str, index: str | None) -> str | None:
        if index is None:
            return self.text(name)
        if index in ("[@]", "[*]"):
            words = self.words(name + index)
            return None if words is None else " ".join(words)
        array, place = self.values.get(name), index[1:-1]
        return array[int(place)] if isinstance(array, list) and place.isdigit() and int(place) < len(array) else None

    def simple(self, text: str) -> str:
        """Expands `$A` and `${A...}` in the text of a default, without its quotes."""
        text = re.sub(r"^(['\"])(.*)\1$", r"\2", text, flags=re.S)
        text = re.sub(r"\$\{([^{}]*)\}", lambda m: self.expand(m[1]), text)
        return re.sub(r"\$([A-Za-z_]\w*)", lambda m: self.expand(m[1]), text)

    def arithmetic(self, text: str) -> str:
        """Returns the value of `$((text))`, whole numbers with + - * / %; the text itself when it is not known."""
        plain = self.simple(text)
        plain = NAME.sub(lambda m: self.text(m[0]) or m[0], plain)
        try:
            return str(_number(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return f"$(({text}))"


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("not a whole number")


def _cut(value: str, operation: str, whole: str) -> str:
    """Applies `#`, `##`, `%`, `%%`, which cut a beginning or an end, or `/old/new` and `//`, which replace plain text."""
    mark, twice = operation[0], operation[:1] == operation[1:2]
    rest = operation[2 if twice else 1 :]
    if mark == "/":
        old, _, new = rest.partition("/")
        return value.replace(old, new, -1 if twice else 1)
    places = range(len(value) + 1)
    if mark == "#":
        cuts = [value[at:] for at in places if fnmatchcase(value[:at], rest)]
    elif mark == "%":
        cuts = [value[:at] for at in places if fnmatchcase(value[at:], rest)]
    else:
        return whole
    return (min if twice else max)(cuts, key=len, default=value)
