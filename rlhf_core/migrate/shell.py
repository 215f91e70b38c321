"""Parses a shell script into its commands, with quotes, continuations, comments, heredocs and variables.

Nothing is executed and no condition is evaluated, so the commands of all branches are listed. An assignment
inside a condition or a loop is used only if its variable has no value yet; `Script.remarks` lists these
places and other places that could not be followed. Expressions that only a shell can compute (`$(...)`,
`$((...))`, `${A%.*}`) stay as written, so that the caller can report them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
BLANKS = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")  # including a comment after them
HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(['\"\\]?)(\w+)['\"]?")  # dash, quote, delimiter
REDIRECTION = re.compile(r"\d*(?:<<<|&>>?|[<>]&|>\||>>?|<)[ \t]*")
OPERATOR = re.compile(r"&&|\|\||[;&|()\n]")
ARITHMETIC = re.compile(r"\(\((?:[^()]|\([^()]*\))*\)\)")
VARIABLE = r"\$(?:\{(?P<braces>(?:[^{}]|\{[^{}]*\})*)\}|(?P<name>[A-Za-z_]\w*|[\d@*#?$!-]))"
# a command substitution or arithmetic, whose brackets may contain brackets
COMPUTED = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
# A word is a sequence of these. An escaped newline continues the line.
PIECE = re.compile(
    rf"""
      '(?P<single>[^']*)'
    | \$'(?P<ansi>(?:[^'\\]|\\.)*)'
    | "\$\{{(?P<array>[A-Za-z_]\w*)\[@\]\}}"
    | "(?P<double>(?>\$\{{[^{{}}]*\}}|{COMPUTED}|\\.|[^"\\])*+)"
    | \\(?P<escaped>.)
    | (?P<computed>{COMPUTED})
    | {VARIABLE}
    | (?P<plain>[^ \t\n;&|<>()'"\\$`]+|\$(?![({{']))
    """,
    re.S | re.X,
)
IN_QUOTES = re.compile(rf"{VARIABLE}|\\(?P<escaped>[$`\"\\\n])", re.S)
OPENING = {"if", "while", "until", "for", "case", "select"}
CLOSING = {"fi", "done", "esac"}
JOINING = {"then", "else", "elif", "do"}
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
ESCAPES = {"n": "\n", "t": "\t"}
BORDER = "\0"  # between the words of an expansion
# name, index, :, operator, default
PARAMETER = re.compile(r"(\w+|[@*#?$!-])(?:\[(\d+|[@*])\])?(?:(:?)([-=])(.*))?", re.S)


class Variables(dict[str, list[str]]):
    """The words of the variables that a script has set, by name. Several words form an array.

    Expands `$A`, `${A:-default}`, `${A[1]}` and `${A[@]}`, and executes nothing. Variables that the script
    does not set and all other expansions stay as `$A` or `${...}`, so that the caller can report them.
    """

    def expand(self, body: str) -> str:
        """Returns the value of `${body}`, which for an array is its first word; if the value is unknown,
        returns `${body}` or `$body` itself."""
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


class Command(NamedTuple):
    """The expanded words of a simple command, and the line on which it begins."""

    words: tuple[str, ...]
    line: int


class Remark(NamedTuple):
    """A remark about the script, for the recipe's comments."""

    line: int
    text: str


@dataclass
class Script:
    """The commands of a script, and remarks about the script."""

    commands: list[Command] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def read_script(text: str, variables: Variables | None = None, line: int = 1) -> Script:
    """Parses a script that begins on `line`, and stores its variables in `variables`. Raises ValueError for
    an unclosed quote or bracket."""
    reader = _Reader(text.replace("\r\n", "\n"), variables if variables is not None else Variables(), line)
    reader.read()
    return reader.script


class _Reader:
    def __init__(self, text: str, variables: Variables, line: int):
        self.text = text
        self.variables = variables
        self.first_line = line
        self.at = 0
        self.depth = 0
        self.guarded = False
        self.words: list[str] = []
        self.start = 0
        self.pending: list[re.Match[str]] = []  # heredocs whose body comes after this line
        self.script = Script()

    def line(self, at: int) -> int:
        return self.first_line + self.text.count("\n", 0, at)

    def fail(self, what: str, at: int) -> ValueError:
        return ValueError(f"line {self.line(at)} of the script: {what}; correct the script")

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Matches a pattern at the current position and moves past the match. Returns the match, or None."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def more(self) -> bool:
        return self.at < len(self.text)

    def read(self) -> None:
        while self.take(BLANKS) and self.more():
            if self.words in ([], ["for"]) and self.take(ARITHMETIC):
                continue
            match = self.take(HEREDOC)
            if match:
                self.pending.append(match)
            elif self.take(REDIRECTION):
                self.word()
            elif match := self.take(OPERATOR):
                self.end_command(match[0], self.heredocs() if match[0] == "\n" else "")
            else:
                self.start = self.start if self.words else self.at
                found = self.word()
                if self.words or not found or not self.reserved(found[0]):
                    self.words += found
        self.end_command("\n", self.heredocs())

    def reserved(self, word: str) -> bool:
        """Returns whether this is a reserved word after which a command begins."""
        self.depth += (word in OPENING) - (word in CLOSING)
        return word in CLOSING | JOINING | {"if", "while", "until", "{", "}", "!", "time", "exec", "command"}

    def end_command(self, operator: str, stdin: str) -> None:
        words = self.words
        self.words = []
        guarded = self.guarded or self.depth > 0
        self.guarded = operator in ("&&", "||")
        if not words:
            return
        if words[0] == "for" and len(words) > 3 and words[2] == "in":
            self.variables.setdefault(words[1], [words[3]])
            if len(words) > 4:
                self.remark(
                    f"the loop over {words[1]} is read once, with"
                    f" {words[1]}={self.variables.expand(words[1])}"
                )
        elif words[0] == "read" and stdin:
            self.assign(words[-1], "", [stdin.strip()], guarded)
        elif words[0] in ("source", "."):
            self.remark(f"{' '.join(words)} is not read: what it sets is unknown here")
        else:
            rest = words[1:] if words[0] in DECLARING else words
            found = [match for word in rest if (match := ASSIGNMENT.match(word))]
            if len(found) == len(rest) or words[0] in DECLARING:
                for match in found:
                    self.assign(match[1], match[2], [match.string[match.end() :]], guarded, text=True)
        self.script.commands.append(Command(tuple(words), self.line(self.start)))

    def assign(self, name: str, plus: str, words: list[str], guarded: bool, text: bool = False) -> None:
        """Sets a variable. `text`: whether `words` holds a single string, which `+=` appends to the existing
        string, rather than the words of an array."""
        known = self.variables.get(name, [])
        if guarded and name in self.variables:
            if known != words:
                self.remark(f"{name} is set again in a condition or a loop; its first value is used")
        elif plus and text:
            self.variables[name] = ["".join(known[:1]) + words[0]]
        else:
            self.variables[name] = [*known, *words] if plus else words

    def remark(self, text: str) -> None:
        self.script.remarks.append(Remark(self.line(self.start), text))

    def heredocs(self) -> str:
        """Reads the heredocs announced on the line just read. Returns the body of the last one, expanded if
        its delimiter is unquoted."""
        text = ""
        for match in self.pending:
            dash, quote, delimiter = match.groups()
            tabs = r"\t*" if dash else ""
            body = self.take(re.compile(rf"(.*?)^{tabs}{re.escape(delimiter)}(?:\n|\Z)", re.S | re.M))
            if not body:
                raise self.fail(f"the heredoc {delimiter} is never closed", match.start())
            text = re.sub(r"^\t+", "", body[1], flags=re.M) if dash else body[1]
            text = text if quote else self.in_quotes(text)
        self.pending = []
        return text

    def word(self) -> list[str]:
        """Reads one word of the script. An unquoted expansion may turn the word into no words or several
        words."""
        begin = self.at
        text = ""
        quoted = False
        while piece := self.take(PIECE):
            quoted = (
                quoted
                or piece["single"] is not None
                or piece["double"] is not None
                or piece["ansi"] is not None
            )
            if piece["array"]:
                words = self.variables.get(piece["array"])
                text += piece[0].strip('"') if words is None else BORDER.join(words)
            elif piece["double"] is not None:
                text += self.in_quotes(piece["double"])
            elif piece["ansi"] is not None:
                text += re.sub(
                    r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), piece["ansi"], flags=re.S
                )
            elif variable := piece["braces"] or piece["name"]:
                value = self.variables.expand(variable)
                text += (
                    value
                    if value.startswith("$") or ASSIGNMENT.match(text)
                    else re.sub(r"\s+", BORDER, value)
                )
            elif piece["escaped"] != "\n":
                quoted = quoted or piece["escaped"] is not None
                text += piece["single"] or piece["escaped"] or piece["computed"] or piece["plain"] or ""
        if self.at == begin:
            raise self.unclosed()
        if self.text.startswith("(", self.at) and (match := ASSIGNMENT.fullmatch(text)):
            self.assign(match[1], match[2], self.array(), self.guarded or self.depth > 0)
            return []
        return [part for part in text.split(BORDER) if part] or [""] * quoted

    def unclosed(self) -> ValueError:
        opening = self.text[self.at : self.at + 2].lstrip("$")[:1]
        if opening == "\\":
            return self.fail("it ends in a backslash", self.at)
        return self.fail(
            f"the {'bracket' if opening in '({' else 'quote'} {opening} is never closed", self.at
        )

    def array(self) -> list[str]:
        begin = self.at
        self.at = self.at + 1
        words: list[str] = []
        while self.take(BLANKS) and self.more():
            if self.text[self.at] not in ")\n;&|<>(":
                words += self.word()
                continue
            self.at += 1
            if self.text[self.at - 1] == ")":
                return words
        raise self.fail("the bracket ( is never closed", begin)

    def in_quotes(self, text: str) -> str:
        """Expands the variables in a string as inside double quotes."""
        return IN_QUOTES.sub(
            lambda m: (
                m["escaped"].strip("\n") if m["escaped"] else self.variables.expand(m["braces"] or m["name"])
            ),
            text,
        )
