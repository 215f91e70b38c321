r"""Finds the final answer in a response. Standard library only.

An answer has one of these forms, in order of precedence: `\boxed{...}`, a line `#### ...` (as in GSM8K), or a
sentence with `answer is ...` or `answer: ...`. The last occurrence of a form counts. Sentences without a
number or a formula count only if no sentence has one. A sentence with several values, or one that hedges, is
not an answer. A response that is nothing but a number or a formula is itself the answer.
"""

from __future__ import annotations

import re

LONGEST = 1000  # characters of a final answer; anything longer does not count
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
HASHES = re.compile(r"####[ \t]*([^\n]*)")
FORMULA = r"\\\[[\s\S]{1,500}?\\\]|\\\(.{1,500}?\\\)|\$\$[^$]{1,500}\$\$|\$(?=\S)[^$\n]{1,500}(?<=\S)\$(?!\d)"
# also `**Answer:** 5`, and a value on the next line, even after `- ` or `* `
STATED = re.compile(
    r"\banswer(?:\*\*)?(?:[ \t]+is\b|[ \t]*:)(?:\n\s*[-*][ \t]+|[\s:]|\*\*(?=\s))*"
    rf"(?P<sentence>(?:{FORMULA}|[^\n.;!]|\.(?=\S))*)",
    re.IGNORECASE,
)
HEDGES = re.compile(
    r"\?|n't\b|\b(?:not|or|either|between|neither|nor|at least|at most|more than|less than|maybe|perhaps"
    r"|wrong|incorrect|unknown)\b",
    re.IGNORECASE,
)
SCALES = re.compile(  # words that change the value of the number beside them
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|halves|thirds?|quarters?|squared|cubed"
    r"|below)s?\b",
    re.IGNORECASE,
)
BOLD = re.compile(r"\*\*(.+?)\*\*")
NO_WORD = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
WORD = re.compile(r"[^\W\d_]{2}")
MINUS = re.compile(r"(?:\b(?:minus|negative)\b|-)\s*(?=[$\d.\\])", re.IGNORECASE)
VALUE = re.compile(
    rf"(?P<formula>{FORMULA})"
    r"|(?P<number>(?<![\w.,/:-])[-+]?\$?(?:\d+\s+(?=\d+/))?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s?\\?%)?"
    r"(?![\w^]|[.,/:]\d))"
)
UNIT = re.compile(r"\s?([A-Za-z]+(?:[ /][A-Za-z]+)*)")
MORE_THAN_WORDS = re.compile(r"[\d=<>^*+\\{}$~≈≤≥±≠]|(?<![A-Za-z])/|\b(?:plus|times|over|pi|sqrt)\b")


def final_answer(text: str) -> str | None:
    """Returns the final answer in a response; None if there is none, or if it is longer than LONGEST."""
    found = _final(plain_signs(text))
    if found is None:
        return None
    found = found.strip().strip("*_`").strip()
    return found if 0 < len(found) <= LONGEST else None


def plain_signs(text: str) -> str:
    """Returns text with minus signs, and en dashes that are not between numbers, replaced by hyphens."""
    return re.sub(r"(?<!\d)(?<!\d )–", "-", text.replace("−", "-"))


def _final(text: str) -> str | None:
    boxes = list(BOXED.finditer(text))
    if boxes:
        return _braced(text, boxes[-1].end())
    hashes = HASHES.findall(text)
    if hashes:
        return str(hashes[-1])
    sentences = [stated["sentence"].strip() for stated in STATED.finditer(text)]
    said = [sentence for sentence in sentences if sentence.strip("*")]
    for sentence in reversed(said):
        if HEDGES.search(sentence) or len(sentence) > LONGEST:
            return None
        if re.search(r"[\d$]|\\[(\[]", sentence):
            return _value(sentence)
    if said:
        return said[-1]
    whole = text.strip().removesuffix(".")
    return _bare(whole) if VALUE.fullmatch(whole) else None


def _value(sentence: str) -> str | None:
    """Returns the one value of a sentence, followed by any words that may be its unit.

    Only the bold part counts, if there is one. Without words and formulas between dollar signs, this is the
    whole sentence; otherwise its only formula or number. Returns None if there are several, or if anything
    other than words accompanies it.
    """
    bold = BOLD.findall(sentence)
    stated = MINUS.sub("-", bold[0] if len(bold) == 1 else sentence)
    values = list(VALUE.finditer(stated))
    if not WORD.search(NO_WORD.sub("", stated)) and all(value["number"] for value in values):
        return stated
    if len(values) != 1:
        return None
    after = stated[values[0].end() :]
    beside = stated[: values[0].start()] + " " + after
    if MORE_THAN_WORDS.search(beside) or SCALES.search(beside):
        return None
    unit = UNIT.match(after)
    found = _bare(values[0][0])
    return rf"{found} \text{{{unit[1]}}}" if unit else found


def _bare(value: str) -> str:
    """Returns a number unchanged, or a formula without its delimiters."""
    if value[:2] in (r"\[", r"\("):
        return value[2:-2]
    return value.strip("$")


def _braced(text: str, start: int) -> str | None:
    """Returns the contents of the braces that open at `start`; None if they do not close within LONGEST."""
    depth = 0
    for place in range(start, min(len(text), start + LONGEST + 2)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[start + 1 : place]
    return None
