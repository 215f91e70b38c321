"""Finds prompts that match evaluation questions. A prompt matches if it has the same text, up to case and
punctuation, or 13 consecutive words in common with a question. Torch-free.

The 13 words follow Brown et al. 2020, appendix C. A question of 5 to 12 words matches a prompt that contains
all of it; a shorter question matches only the same text, since a few words may occur anywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

RUN = 13
SHORTEST = 5  # words
WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Returns the words of a text, NFKC-normalised and case-folded, without punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Questions:
    """Indexes texts of evaluation questions by runs of words."""

    def __init__(self, texts: Iterable[str]):
        self._whole: set[str] = set()
        self._runs: set[str] = set()
        self._short: dict[str, list[list[str]]] = defaultdict(list)  # keyed by their first words
        for text in texts:
            words = words_of(text)
            self._whole.add(" ".join(words))
            if len(words) >= RUN:
                self._runs.update(_runs(words, RUN))
            elif len(words) >= SHORTEST:
                self._short[" ".join(words[:SHORTEST])].append(words)
        self._whole.discard("")

    def met_by(self, text: str) -> bool:
        """Returns whether a prompt matches a question."""
        if not self._whole:
            return False
        words = words_of(text)
        if " ".join(words) in self._whole or (
            self._runs and any(run in self._runs for run in _runs(words, RUN))
        ):
            return True
        if not self._short:
            return False
        starts = enumerate(_runs(words, SHORTEST))
        return any(
            words[i : i + len(question)] == question
            for i, run in starts
            for question in self._short.get(run, ())
        )


def _runs(words: Sequence[str], length: int) -> list[str]:
    return [" ".join(words[i : i + length]) for i in range(len(words) - length + 1)]
