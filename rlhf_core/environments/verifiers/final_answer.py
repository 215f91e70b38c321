r"""Finds the final answer in a text. Standard library only.

The first of these that a text has decides, and of several the last one: `\boxed{...}`, a line `#### ...` (as
in GSM8K), `answer is ...` or `answer: ...`, and a formula between dollar signs or a number.
"""

from __future__ import annotations

import re

LONGEST = 1000  # characters of a final answer; a longer one is none
TAIL = 2000  # last characters of a text, in which formulas and numbers are looked for
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
HASHES = re.compile(r"####[ \t]*([^\n]*)")
STATED = re.compile(r"\banswer(?:[ \t]+is\b|[ \t]*:)[ \t:]*", re.IGNORECASE)
BOLD = re.compile(r"\*\*(.+?)\*\*")
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[^\W\d_]{2}")
VALUE = re.compile(
    r"\$\$?(?=\S)(?P<formula>[^$\n]+?)(?<=\S)\$\$?(?!\d)"
    r"|\\\((?P<inline>.+?)\\\)|\\\[(?P<display>.+?)\\\]"
    r"|(?P<number>(?<![\w.])[-+]?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?/\s?\d+)?\s?\\?%?)"
)


def final_answer(text: str) -> str | None:
    """Returns the final answer in a text; None if there is none, or it is longer than LONGEST."""
    found = _final(text)
    if found is None:
        return None
    found = found.strip().strip("*_`").strip()
    return found if 0 < len(found) <= LONGEST else None


def _final(text: str) -> str | None:
    boxes = list(BOXED.finditer(text))
    if boxes:
        return _braced(text, boxes[-1].end())
    hashes = HASHES.findall(text)
    if hashes:
        return str(hashes[-1])
    stated = list(STATED.finditer(text))
    rest = text[stated[-1].end() :].partition("\n")[0] if stated else ""
    if rest.strip(" .*"):
        return _of_sentence(rest)
    return _last_value(text[-TAIL:])


def _of_sentence(rest: str) -> str:
    """Returns the answer in what follows `answer is`: what is bold at its start; all of it if it has no
    words, else its first formula or number, else its words."""
    bold = BOLD.match(rest)
    if bold:
        return bold[1]
    whole = rest.strip().rstrip(".")
    value = VALUE.search(rest) if WORD.search(COMMAND.sub("", whole)) else None
    return whole if value is None else _group(value)


def _last_value(text: str) -> str | None:
    """Returns the last formula or number of a text."""
    values = list(VALUE.finditer(text))
    return _group(values[-1]) if values else None


def _group(value: re.Match[str]) -> str:
    return next(group for group in value.groups() if group is not None)


def _braced(text: str, start: int) -> str | None:
    """Returns what is in the braces that open at `start`; None if they do not close within LONGEST."""
    depth = 0
    for place in range(start, min(len(text), start + LONGEST + 2)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[start + 1 : place]
    return None
