"""Parses a shell script into its commands, with quotes, continuations, comments, heredocs and variables.

Nothing is executed and no condition is evaluated: the commands of all branches are listed. An assignment inside a condition or a loop
is used only when its variable has no value yet; `Script.remarks` lists such places and others that could not be followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_core.migrate.variables import Variables

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
HERE_SUBSTITUTION = re.compile(r"\s*cat\s*<<(-?)\s*(['\"]?)(\w+)\2[^\n]*\n(.*?)\n?[ \t]*\3\s*", re.S)
QUOTED_DEFAULT = re.compile(r"\w+:?[-=](['\"]).*\1", re.S)  # its value is not split into words
OPENING, CLOSING, JOINING = {"if", "while", "until", "for", "case", "select"}, {"fi", "done", "esac"}, {"then", "else", "elif", "do"}
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v", "0": "\0"}


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
        self.quoted_first = False
        self.start = 0
        self.stdin = ""
        self.pending: list[tuple[str, bool, bool]] = []  # heredocs whose text comes after this line: delimiter, expanded, tabs cut
        self.script = Script()

    def line(self, at: int | None = None) -> int:
        return self.first_line + self.text.count("\n", 0, self.at if at is None else at)

    def fail(self, what: str, at: int) -> ValueError:
        return ValueError(f"line {self.line(at)} of the script: {what} is never closed; correct the script")

    def read(self) -> None:
        while self.at < len(self.text):
            self.skip_blanks()
            if self.at >= len(self.text):
                break
            char = self.text[self.at]
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n":
                self.at += 1
                self.read_heredocs()
                self.end_command("\n")
            elif self.text.startswith("((", self.at) and (not self.words or self.words == ["for"]):
                self.at = self.matching(self.at + 1, "(", ")") + 1
            elif match := re.compile(r"\d*(<<<|<<-?|&>>?|[<>]&|>\||>>?|<)").match(self.text, self.at):
                self.redirect(match)
            elif match := re.compile(r"&&|\|\||;;|\|&|[;&|()]").match(self.text, self.at):
                self.at = match.end()
                self.end_command(match[0])
            else:
                if not self.words:
                    self.start, self.quoted_first = self.at, char in "'\"\\"
                found = self.word()
                if not self.words and found and not self.quoted_first and self.reserved(found[0]):
                    continue
                self.words += found
        self.read_heredocs()
        self.end_command("\n")

    def skip_blanks(self) -> None:
        while self.at < len(self.text) and (self.text[self.at] in " \t\r" or self.text.startswith("\\\n", self.at)):
            self.at += 2 if self.text[self.at] == "\\" else 1

    def reserved(self, word: str) -> bool:
        """Returns whether this is a reserved word after which a command begins."""
        self.depth += (word in OPENING) - (word in CLOSING)
        return word in CLOSING | JOINING | {"if", "while", "until", "{", "}", "!", "time", "exec", "command"}

    def end_command(self, operator: str) -> None:
        words, self.words = self.words, []
        guarded, self.guarded = self.guarded or self.depth > 0, operator in ("&&", "||")
        stdin, self.stdin = (self.stdin, "") if operator == "\n" or words else ("", self.stdin)
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
        elif not self.quoted_first:
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
            old = values.get(name, [])
            values[name] = [*(old if isinstance(old, list) else [old]), *value]
        elif plus and isinstance(value, str):
            values[name] = (self.variables.text(name) or "") + value
        else:
            values[name] = value

    def remark(self, text: str) -> None:
        self.script.remarks.append(Remark(self.line(self.start), text))

    def redirect(self, match: re.Match[str]) -> None:
        operator, self.at = match[1], match.end()
        self.skip_blanks()
        if operator in ("<<", "<<-"):
            raw = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()]+)").match(self.text, self.at)
            if not raw:
                raise ValueError(f"line {self.line()} of the script: a heredoc has no delimiter; correct the script")
            quoted = raw[3] is None or raw[0].startswith("\\")
            self.pending.append((raw[1] or raw[2] or raw[3] or "", not quoted, operator == "<<-"))
            self.at = raw.end()
        elif self.at < len(self.text) and self.text[self.at] not in "\n;|&":
            if self.text[self.at] == "(":  # a process substitution
                self.at = self.matching(self.at, "(", ")") + 1
                return
            target = self.word()
            if operator == "<<<":
                self.stdin = " ".join(target)

    def read_heredocs(self) -> None:
        for delimiter, expanded, tabs in self.pending:
            begin, lines = self.at, []
            while True:
                if self.at >= len(self.text):
                    raise self.fail(f"the heredoc {delimiter}", begin - 1)
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
                lines.append(line.lstrip("\t") if tabs else line)
            text = "\n".join(lines)
            self.stdin = self.expand_text(text) if expanded else text
        self.pending = []

    def expand_text(self, text: str) -> str:
        """Expands a text as between double quotes."""
        inner = _Reader(text, self.variables, self.line())
        pieces: list[str] = []
        while inner.at < len(text):
            pieces.append(inner.double_quoted_piece(keep_quotes=True))
        return "".join(pieces)

    def word(self) -> list[str]:
        """Reads one word of the script; an expansion without quotes may turn it into none or several."""
        done: list[str] = []
        current: str | None = None
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>()":
            char = self.text[self.at]
            if char == "'":
                current = (current or "") + self.between("'")
            elif self.text.startswith("$'", self.at):
                self.at += 1
                current = (current or "") + self.ansi()
            elif char == '"':
                begin, self.at = self.at, self.at + 1
                if array := self.array_in_quotes():
                    current = (current or "") + array[0] if len(array) == 1 else _spread(done, current, array)
                    continue
                current = current or ""
                while True:
                    if self.at >= len(self.text):
                        raise self.fail('the quote "', begin)
                    if self.text[self.at] == '"':
                        self.at += 1
                        break
                    current += self.double_quoted_piece()
            elif char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                if not following:
                    raise ValueError(f"line {self.line()} of the script: it ends in a backslash; correct the script")
                current = current if following == "\n" else (current or "") + following
                self.at += 2
            elif char in "$`":
                known, text = self.dollar()
                if not known or (current is not None and ASSIGNMENT.match(current)):
                    current = (current or "") + text
                    continue
                pieces = text.split()
                if not pieces:
                    continue
                if text[0].isspace() and current is not None:
                    done.append(current)
                    current = None
                current = _spread(done, current, pieces)
                if text[-1].isspace():
                    done.append(current)
                    current = None
            else:
                current = (current or "") + char
                self.at += 1
        if current is not None and self.at < len(self.text) and self.text[self.at] == "(" and (match := ASSIGNMENT.fullmatch(current)):
            self.assign(match[1], match[2], self.array(), self.guarded or self.depth > 0)
            return done
        return done if current is None else [*done, current]

    def array(self) -> list[str]:
        begin, self.at = self.at, self.at + 1
        words: list[str] = []
        while True:
            self.skip_blanks()
            if self.at >= len(self.text):
                raise self.fail("the bracket (", begin)
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return words
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in "\n;&|<>(":
                self.at += 1
            else:
                words += self.word()

    def array_in_quotes(self) -> list[str] | None:
        """Returns the words of `"${NAME[@]}"`, which stay separate between quotes; None for anything else."""
        match = re.compile(r"\$\{([A-Za-z_]\w*\[@\])\}\"").match(self.text, self.at)
        words = self.variables.words(match[1]) if match else None
        if match and words:
            self.at = match.end()
        return words

    def between(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.fail(f"the quote {quote}", self.at)
        found, self.at = self.text[self.at + 1 : end], end + 1
        return found

    def ansi(self) -> str:
        """Returns the text of `$'...'`."""
        match = re.compile(r"'((?:[^'\\]|\\.)*)'", re.S).match(self.text, self.at)
        if not match:
            raise self.fail("the quote $'", self.at)
        self.at = match.end()
        return re.sub(r"\\(.)", lambda m: ESCAPES.get(m[1], m[1] if m[1] in "\\'\"?" else m[0]), match[1], flags=re.S)

    def double_quoted_piece(self, keep_quotes: bool = False) -> str:
        char = self.text[self.at]
        if char == "\\" and self.at + 1 < len(self.text):
            following = self.text[self.at + 1]
            self.at += 2
            if following == "\n":
                return ""
            return following if following in ("$`\\" if keep_quotes else '$`\\"') else "\\" + following
        if char in "$`":
            return self.dollar()[1]
        self.at += 1
        return char

    def dollar(self) -> tuple[bool, str]:
        """Expands `$...` or backquotes; returns whether the value is known (and so is split into words), and the text."""
        begin, rest = self.at, self.text[self.at : self.at + 3]
        if rest.startswith("`"):
            return False, f"`{self.between('`')}`"
        if rest == "$((":
            end = self.matching(self.at + 1, "(", ")")
            self.at = end + 1
            text = self.variables.arithmetic(self.text[begin + 3 : end - 1])
            return not text.startswith("$"), text
        if rest.startswith("$("):
            end = self.matching(self.at + 1, "(", ")")
            self.at = end + 1
            body = self.text[begin + 2 : end]
            if here := HERE_SUBSTITUTION.fullmatch(body):
                return True, here[4] if here[2] else self.expand_text(here[4])
            return False, f"$({body})"
        if rest.startswith("${"):
            end = self.matching(self.at + 1, "{", "}")
            self.at = end + 1
            body = self.text[begin + 2 : end]
            known, text = self.known(self.variables.expand(body))
            return known and not QUOTED_DEFAULT.fullmatch(body), text
        match = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])").match(self.text, self.at)
        if not match:
            self.at += 1
            return True, "$"
        self.at = match.end()
        return self.known(self.variables.expand(match[1]))

    def known(self, text: str) -> tuple[bool, str]:
        return not text.startswith("$"), text

    def matching(self, at: int, opening: str, closing: str) -> int:
        """Returns where the bracket that opens at `at` closes; skips quotes inside."""
        depth, place = 0, at
        while place < len(self.text):
            char = self.text[place]
            if char == "\\":
                place += 1
            elif char == "'" and closing == ")":
                place = self.text.find("'", place + 1)
                if place < 0:
                    break
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return place
            place += 1
        raise self.fail(f"the bracket {opening}", at)


def _spread(done: list[str], current: str | None, pieces: list[str]) -> str:
    """Appends the words of an expansion to `done`, but the last one, which is returned because it may continue."""
    done += [(current or "") + pieces[0], *pieces[1:]]
    return done.pop()
