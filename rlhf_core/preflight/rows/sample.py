"""Counts how many of a data set's first rows a stage would drop or truncate because of its token limit.
Torch-free."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from rlhf_core.data.pictures.picture_source import TOO_LONG
from rlhf_core.data.sources import SAME_CUT
from rlhf_core.data.survey import ANSWER_CUT, LIMITS, BuiltItems

SAMPLED_ROWS = 200
SAMPLE_SECONDS = 5.0  # seconds of CPU time, for rows with many tokens
NOUNS = {"preference": "pairs", "labelled": "answers", "prompt": "prompts"}


def noun_of(kind: str | None) -> str:
    """Returns the noun for the items that a stage counts in rows of this kind."""
    return NOUNS.get(kind or "", "rows")


@dataclass
class RowSample:
    """Counts the first rows of a data set. `limit_field` and `limit` are the stage's token limit, for
    sentences. `noun` names the items that the stage counts."""

    limit_field: str
    limit: int
    noun: str = "rows"
    rows: int = 0
    items: int = 0
    kept: int = 0
    cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    example: str = ""
    _begun: float = field(default_factory=time.process_time)

    @property
    def is_full(self) -> bool:
        """Returns whether the sample is complete."""
        return self.rows >= SAMPLED_ROWS or time.process_time() - self._begun > SAMPLE_SECONDS

    def see(self, where: str, made: BuiltItems) -> None:
        """Adds the result for the row at `where` to the counts."""
        self.rows += 1
        self.items += made.rows
        self.kept += len(made.items)
        self.cut += int(made.cut)
        if made.dropped:
            self.left_out[made.dropped] += made.rows - len(made.items)
            self.example = self.example or where

    def refusal(self, is_whole: bool) -> str:
        """Returns a sentence if the stage would drop all rows of the sample and the sample is the whole data
        set (`is_whole`); otherwise ""."""
        if not is_whole or self.kept or not self.items:
            return ""
        return f"all {self.items} {self.noun} would be left out ({self._reasons()}): {self._advice()}"

    def warnings(self, is_whole: bool) -> list[str]:
        """Returns a sentence if the fraction of dropped rows, or of truncated rows, is larger than LIMITS
        allows."""
        among = f"{self.items} {self.noun}" if is_whole else f"the first {self.items} {self.noun}"
        lost = self.items - self.kept
        found = []
        if lost > LIMITS["dropped"] * self.items:
            found.append(
                f"{lost} of {among} would be left out ({self._reasons()}; for instance {self.example}):"
                f" {self._advice()}"
            )
        if self.cut > LIMITS["truncated"] * max(1, self.kept):
            found.append(
                f"{self.cut} of {among} have more tokens than {self.limit_field}={self.limit} and would"
                " be cut"
            )
        return found

    def _reasons(self) -> str:
        return ", ".join(f"{why}: {count}" for why, count in self.left_out.most_common())

    def _advice(self) -> str:
        if {ANSWER_CUT, SAME_CUT, TOO_LONG} & self.left_out.keys():
            return f"raise {self.limit_field}, which is {self.limit}, or correct the data"
        return "correct the data"
