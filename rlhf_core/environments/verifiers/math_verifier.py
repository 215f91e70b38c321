r"""`reward: math`: 1 if the final answer of a response equals that of the row, else 0.

math-verify compares the two as numbers, formulas, sets, intervals or equations: 1/2 equals 0.5 and 50\%, and
1,000 equals 1000; decimals count to six places. Words are compared as text. A response without an answer is
wrong, and so is one that a limit cut, or whose comparison exceeds a limit of time or memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as missing:
    raise ImportError("math-verify is not installed: pip install 'math-verify[antlr4_13_2]'") from missing

from rlhf_core.environments.verifiers.final_answer import final_answer
from rlhf_core.environments.verifiers.forked import forked
from rlhf_core.environments.verifiers.row_cells import known_answer

FORMS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[ ,;:!]|~|\s+")
WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")
CONSTANTS = frozenset(("pi", "inf", "infinity", "oo"))
# forked.py limits the time: the library's own limits, by signals, do not end one long operation
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify_answers(
    responses: Sequence[str],
    rows: Sequence[dict[str, Any]],
    finished: Sequence[bool],
    column: str = "answer",
    seconds: float = 5.0,
) -> list[float]:
    """Returns 1 for each right response, else 0. `seconds`: CPU time of one comparison. Raises ValueError
    when a row has no answer."""
    known = [known_answer(row, column) for row in rows]

    def is_right(place: int) -> bool:
        if not finished[place]:
            return False
        said = final_answer(responses[place])
        return said is not None and same_answer(said, marked_answer(known[place]))

    return [float(right) for right in forked(is_right, len(responses), seconds)]


def marked_answer(known: str) -> str:
    r"""Returns the answer of a row: what it marks with `\boxed{}` or `####`, else all of it."""
    if "\\boxed" in known or "####" in known:
        return final_answer(known) or known
    return known.strip()


def same_answer(said: str, known: str) -> bool:
    """Returns whether two final answers are equal: as text, or as mathematics."""
    one, other = _plain(said), _plain(known)
    if one == other:
        return True
    if _is_words(other):
        return one.casefold() == other.casefold()
    if _is_words(one):
        return False
    right = _parsed(known)
    given = _parsed(said)
    return bool(right and given) and bool(verify(right, given, timeout_seconds=None))


def _plain(text: str) -> str:
    """Returns an answer without markup that has no meaning: dollar signs, fonts, a full stop, parentheses
    around one letter."""
    bare = WRAPPED.sub(r"\1", text.strip().removesuffix(".").strip("$").strip())
    bare = SPACES.sub(" ", bare).strip()
    letter = re.fullmatch(r"\(([A-Za-z])\)", bare)
    return letter[1] if letter else bare


def _is_words(text: str) -> bool:
    """Returns whether an answer is a word or words: letters that are no formula."""
    return bool(WORDS.fullmatch(text)) and text.casefold() not in CONSTANTS


def _parsed(answer: str) -> list[Any]:
    """Returns an answer as mathematics; empty if it is none."""
    bare = answer.strip().strip("$").strip()
    found = parse(rf"\boxed{{{bare}}}", FORMS, fallback_mode="no_fallback", parsing_timeout=None)
    return list(found)


same_answer(r"\frac{1}{2}", "0.25")  # fills the parser's caches, which forked processes then have
