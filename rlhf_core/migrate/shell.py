"""Parses a shell script into its commands, with quotes, continuations, comments, heredocs and variables.

Nothing is executed and no condition is evaluated: the commands of all branches are listed. An assignment inside a condition or a loop
is used only when its variable has no value yet; `Script.remarks` lists such places and others that could not be followed. What only a
shell can compute (`$(...)`, `$((...))`, `${A%.*}`) stays as it is written, so that the caller can report it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_core.migrate.variables import Variables

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
NAME_ALONE = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])")
QUOTED_ARRAY = re.compile(r"\"\$\{([A-Za-z_]\w*)\[@\]\}\"")
BLANKS = re.compile(r"(?:[ \t\r]|\\\n)*(?:#[^\n]*)?")  # with the comment after them
HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(['\"\\]?)(\w+)['\"]?")  # dash, quote, delimiter
REDIRECTION = re.compile(r"\d*(?:<<<|&>>?|[<>]&|>\||>>?|<)[ \t]*")
OPERATOR = re.compile(r"&&|\|\||[;&|()\n]")
LITERAL = re.compile(r"'([^']*)'|\\\n|\\([^\n])|([^ \t\n;&|<>()'\"\\$`]+)")
ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S)
OPENING, CLOSING, JOINING = {"if", "while", "until", "for", "case", "select"}, {"fi", "done", "esac"}, {"then", "else", "elif", "do"}
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
ESCAPES = {"n": "\n", "t": "\t"}
BORDER = "\0"  # between the words of an expansion


class Command(NamedTuple):
    """The words of a simple command, expanded, and the line it begins on."""

    words: tuple[str, ...]
    line: int


class Remark(NamedTuple):
    """A remark about the script, for the recipe's comments."""

    line: int
    text: str


@dataclass
class Script:
    """The commands of a script, and remarks about it."""

    commands: list[Command] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def read_script(text: str, variables: Variables | None = None, line: int = 1) -> Script:
    """Parses a script that begins on `line`, and sets its variables in `variables`. Raises ValueError for an unclosed quote or bracket."""
    reader = _Reader(text.replace("\r\n", "\n"), variables if variables is not None else Variables(), line)
    reader.read()
    return reader.script


class _Reader:
    def __init__(self, text: str, variables: Variables, line: int):
        self.text, self.variables, self.first_line = text, variables, line
        self.at, self.depth, self.guarded = 0, 0, False
        self.words: list[str] = []
        self.start = 0
        self.pending: list[re.Match[str]] = []  # heredocs whose text comes after this line
        self.script = Script()

    def line(self, at: int) -> int:
        return self.first_line + self.text.count("\n", 0, at)

    def fail(self, what: str, at: int) -> ValueError:
        return ValueError(f"line {self.line(at)} of the script: {what}; correct the script")

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Matches a pattern at the current place and moves behind it."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def more(self) -> bool:
        return self.at < len(self.text)

    def read(self) -> None:
        while self.take(BLANKS) and self.more():
            if self.text.startswith("((", self.at) and self.words in ([], ["for"]):
                self.inside("()")
            elif match := self.take(HEREDOC):
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
        words, self.words = self.words, []
        guarded, self.guarded = self.guarded or self.depth > 0, operator in ("&&", "||")
        if not words:
            return
        if words[0] == "for" and len(words) > 3 and words[2] == "in":
            self.variables.values.setdefault(words[1], words[3])
            if len(words) > 4:
                self.remark(f"the loop over {words[1]} is read once, with {words[1]}={self.variables.text(words[1])}")
        elif words[0] == "read" and stdin:
            self.assign(words[-1], "", stdin.strip(), guarded)
        elif words[0] in ("source", "."):
            self.remark(f"{' '.join(words)} is not read: what it sets is unknown here")
        else:
            rest = words[1:] if words[0] in DECLARING else words
            found = [match for word in rest if (match := ASSIGNMENT.match(word))]
            if len(found) == len(rest) or words[0] in DECLARING:
                for match in found:
                    self.assign(match[1], match[2], match.string[match.end() :], guarded)
        self.script.commands.append(Command(tuple(words), self.line(self.start)))

    def assign(self, name: str, plus: str, value: str | list[str], guarded: bool) -> None:
        values = self.variables.values
        if guarded and name in values:
            if values[name] != value:
                self.remark(f"{name} is set again in a condition or a loop; its first value is used")
        elif plus and isinstance(value, list):
            values[name] = [*(self.variables.words(name) or []), *value]
        elif plus and isinstance(value, str):
            values[name] = (self.variables.text(name) or "") + value
        else:
            values[name] = value

    def remark(self, text: str) -> None:
        self.script.remarks.append(Remark(self.line(self.start), text))

    def heredocs(self) -> str:
        """Reads the heredocs of the line that has ended; returns the text of the last one, expanded when its delimiter has no quotes."""
        text = ""
        for match in self.pending:
            dash, quote, delimiter = match.groups()
            tabs = r"\t*" if dash else ""
            body = self.take(re.compile(rf"(.*?)^{tabs}{re.escape(delimiter)}(?:\n|\Z)", re.S | re.M))
            if not body:
                raise self.fail(f"the heredoc {delimiter} is never closed", match.start())
            text = re.sub(r"^\t+", "", body[1], flags=re.M) if dash else body[1]
            text = text if quote else _Reader(text, self.variables, self.line(body.start())).quoted("")
        self.pending = []
        return text

    def word(self) -> list[str]:
        """Reads one word of the script; an expansion without quotes may turn it into none or several."""
        text, quoted = "", False
        while self.more() and self.text[self.at] not in " \t\n;&|<>()":
            begin, char = self.at, self.text[self.at]
            if match := self.take(LITERAL):
                text += "".join(filter(None, match.groups()))
                quoted = quoted or char in "'\\"
            elif match := self.take(ANSI):
                text += re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[1]), match[1], flags=re.S)
                quoted = True
            elif (match := QUOTED_ARRAY.match(self.text, begin)) and (words := self.variables.words(match[1])) is not None:
                text += BORDER.join(words)
                self.at = match.end()
            elif char == '"':
                self.at += 1
                text += self.quoted('"')
                if not self.more():
                    raise self.fail('the quote " is never closed', begin)
                self.at += 1
                quoted = True
            elif char in "$`" and not self.text.startswith("$'", begin):
                value, known = self.dollar()
                text += re.sub(r"\s+", BORDER, value) if known and not ASSIGNMENT.match(text) else value
            else:
                raise self.fail("it ends in a backslash" if char == "\\" else "the quote ' is never closed", begin)
        if self.text.startswith("(", self.at) and (match := ASSIGNMENT.fullmatch(text)):
            self.assign(match[1], match[2], self.array(), self.guarded or self.depth > 0)
            return []
        return [part for part in text.split(BORDER) if part] or [""] * quoted

    def array(self) -> list[str]:
        begin, self.at = self.at, self.at + 1
        words: list[str] = []
        while self.take(BLANKS) and self.more():
            if self.text[self.at] not in ")\n;&|<>(":
                words += self.word()
                continue
            self.at += 1
            if self.text[self.at - 1] == ")":
                return words
        raise self.fail("the bracket ( is never closed", begin)

    def quoted(self, mark: str) -> str:
        """Reads a text as between double quotes, up to the quote `mark`; up to the end when that is ''."""
        text = ""
        escaped = re.compile(rf"\\([$`\\\n{mark}])")
        while self.more() and self.text[self.at] != mark:
            if match := self.take(escaped):
                text += match[1].strip("\n")
            elif self.text[self.at] in "$`":
                text += self.dollar()[0]
            else:
                text += self.text[self.at]
                self.at += 1
        return text

    def dollar(self) -> tuple[str, bool]:
        """Expands `$A` and `${A}`; returns the text, and whether it is known. Commands and arithmetic stay as they are written."""
        begin, closing = self.at, {"(": "()", "{": "{}"}.get(self.text[self.at + 1 : self.at + 2])
        if self.text[begin] == "`":
            self.at = self.text.find("`", begin + 1) + 1
            if not self.at:
                raise self.fail("the quote ` is never closed", begin)
        elif closing:
            self.at += 1
            body = self.inside(closing)
            if closing == "{}":
                value = self.variables.expand(body)
                return value, not value.startswith("$")
        elif match := self.take(NAME_ALONE):
            value = self.variables.expand(match[1])
            return value, not value.startswith("$")
        else:
            self.at += 1
        return self.text[begin : self.at], False

    def inside(self, brackets: str) -> str:
        """Moves behind the bracket that closes the one at this place, and returns what is between; skips quotes inside."""
        depth, begin = 0, self.at
        while self.more():
            char = self.text[self.at]
            if char == "\\":
                self.at += 1
            elif char == "'" and brackets == "()":
                self.at = self.text.find("'", self.at + 1)
                if self.at < 0:
                    break
            depth += (char == brackets[0]) - (char == brackets[1])
            self.at += 1
            if depth == 0:
                return self.text[begin + 1 : self.at - 1]
        raise self.fail(f"the bracket {brackets[0]} is never closed", begin)
