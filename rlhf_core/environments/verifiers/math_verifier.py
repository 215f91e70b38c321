r"""`reward: math`: 1 if the final answer of a response equals the row's, otherwise 0.

math-verify compares the two as numbers, formulas, sets, intervals or equations: 1/2 equals 0.5 and 50\%, and
1,000 equals 1000. Decimals are compared to six places, and below 0.001 to three significant digits. Units and
bases are compared as text if both answers have one. Answers in words are compared as text. A response is
wrong if it has no answer, was truncated by a limit, or takes too much time or memory to compare.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as missing:
    raise ImportError("math-verify is not installed: pip install 'math-verify[antlr4_13_2]'") from missing

from rlhf_core.environments.verifiers.final_answer import SCALES, final_answer, plain_signs
from rlhf_core.environments.verifiers.forked import forked
from rlhf_core.environments.verifiers.row_cells import known_answer

FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[ ,;:!]|~|\s+")
WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
CONSTANTS = frozenset(("pi", "inf", "infinity", "oo"))
SMALL = 1e-3  # six decimals of a smaller number give fewer than three significant digits
SIGNIFICANT = 1e-3
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d+)\b")
MIXED = re.compile(r"(?<![\w./])(\d+)\s+(\d+)/(\d+)(?![\w.])")
PERCENT = re.compile(r"\s*\bpercent\b")
BASE = re.compile(r"-?[\dA-Z]+_\{?(\d+)\}?")
UNIT = re.compile(
    r"[-+]?\s*(?:\\[dt]?frac\s*\{\d+\}\s*\{\d+\}|\(?[\d.,:/+ ]*\d\)?(?:\s*\\times\s*10\^\{?-?\d+\}?)?)\$?"
    r"\s*(?P<unit>[A-Za-zµ].*)"
)
# forked.py limits the time: the library's own limits, which use signals, do not stop one long operation
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify_answers(
    responses: Sequence[str],
    rows: Sequence[dict[str, Any]],
    finished: Sequence[bool],
    column: str = "answer",
    seconds: float = 5.0,
) -> list[float]:
    """Returns 1 for each right response, otherwise 0. `seconds`: limit on the CPU time of one comparison.
    Raises ValueError when a row has no answer."""
    known = [known_answer(row, column) for row in rows]

    def is_right(place: int) -> bool:
        if not finished[place]:
            return False
        said = final_answer(responses[place])
        return said is not None and same_answer(said, marked_answer(known[place]))

    return [float(right) for right in forked(is_right, len(responses), seconds)]


def marked_answer(known: str) -> str:
    r"""Returns a row's answer: the part marked with `\boxed{}` or `####`, or else all of it."""
    if "\\boxed" in known or "####" in known:
        return final_answer(known) or known
    return known.strip()


def same_answer(said: str, known: str) -> bool:
    """Returns whether two final answers are equal, as text or mathematically."""
    said, known = _spelt_out(said), _spelt_out(known)
    one, other = _plain(said), _plain(known)
    if one == other:
        return True
    if _is_words(other):
        return one.casefold() == other.casefold()
    if _is_words(one):
        return False
    if _differ(BASE, one, other) or SCALES.findall(one) != SCALES.findall(other):
        return False
    right = _parsed(known)
    given = _parsed(said)
    if not right or not given or not verify(right, given, timeout_seconds=None):
        return False
    if _differ(UNIT, one, other) and not _variables(right[0]) and not _variables(given[0]):
        return False  # the library has dropped both units
    return _are_near(right[0], given[0])


def _spelt_out(answer: str) -> str:
    r"""Rewrites forms that the library misreads: 1e-9, 3 1/2, 0.\overline{3}, 5 percent, and minus signs
    other than hyphens."""
    text = PERCENT.sub(r"\\%", plain_signs(answer))
    text = MIXED.sub(r"(\1+\2/\3)", SCIENTIFIC.sub(r"\1\\times 10^{\2}", text))
    return REPEATING.sub(_fraction, text)


def _fraction(decimal: re.Match[str]) -> str:
    """Converts a repeating decimal to a fraction."""
    whole, once, again = decimal.groups()
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    value = Fraction(int(f"{whole}{once}{again}") - int(f"0{whole}{once}"), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _differ(part: re.Pattern[str], one: str, other: str) -> bool:
    """Returns whether both answers have this part (a base or a unit) and differ in it."""
    found, known = part.fullmatch(one), part.fullmatch(other)
    return bool(found and known) and _part(found) != _part(known)


def _part(found: re.Match[str] | None) -> str:
    """Returns a base or a unit without spaces, braces and a plural s."""
    text = "" if found is None else found[1].replace("²", "^2").replace("³", "^3")
    bare = re.sub(r"[\s{}.]", "", text)
    return bare.removesuffix("s") if len(bare) > 2 else bare


def _variables(parsed: Any) -> bool:
    return bool(getattr(parsed, "free_symbols", None))


def _are_near(one: Any, other: Any) -> bool:
    """Returns whether two answers that agree to six decimals also agree to three significant digits."""
    values = [getattr(answer, "rhs", answer) for answer in (one, other)]
    if not all(getattr(value, "is_number", False) and value.is_real for value in values):
        return True
    if any(abs(value) >= SMALL for value in values):
        return True
    return math.isclose(float(values[0]), float(values[1]), rel_tol=SIGNIFICANT)


def _plain(text: str) -> str:
    """Returns an answer without meaningless markup: dollar signs, fonts, a full stop, parentheses around one
    letter."""
    bare = WRAPPED.sub(r"\1", text.strip().removesuffix(".").strip("$").strip())
    bare = SPACES.sub(" ", bare).strip()
    letter = re.fullmatch(r"\(([A-Za-z])\)", bare)
    return letter[1] if letter else bare


def _is_words(text: str) -> bool:
    """Returns whether an answer consists of words, that is, of letters that are not a formula."""
    return bool(WORDS.fullmatch(text)) and text.casefold() not in CONSTANTS


def _parsed(answer: str) -> list[Any]:
    """Parses an answer as mathematics; returns an empty list if it is not mathematics."""
    bare = answer.strip().strip("$").strip()
    found = parse(rf"\boxed{{{bare}}}", FORMS, fallback_mode="no_fallback", parsing_timeout=None)
    return list(found)


same_answer(r"\frac{1}{2}", "0.25")  # fills the parser's caches, which forked processes inherit
