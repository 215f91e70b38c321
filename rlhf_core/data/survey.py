"""Counts lengths, duplicates, and empty and damaged texts while the rows of a data set are read, before
training. Torch-free.

Memory per row is a few dozen bytes: digests of text and prompt, source and number, and lengths in tokens. A
finding is a sentence, with an example row, about a fact beyond its limit in LIMITS or BALANCE.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

import numpy as np

from rlhf_core.config import Data
from rlhf_core.data.documents import Document, Item, as_text
from rlhf_core.data.pictures.message_parts import content_text
from rlhf_core.data.pictures.picture_source import PICTURE_FACTS
from rlhf_core.data.rows.columns import (
    Kind,
    Located,
    conversation_of,
    labelled_of,
    pictured_prompt_of,
    preference_of,
    reward_of,
    written,
)
from rlhf_core.data.rows.columns import answer_of as prompt_and_answer
from rlhf_core.data.rows.mixture import Mixture, Placed, unusable
from rlhf_core.records import Frozen

# Replacement and control characters, and UTF-8 that was read as Latin-1 or Windows-1252.
DAMAGE = re.compile("[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|[\u00c2\u00c3][\x80-\xbf]|\u00e2\u20ac")
PERCENTILES = {"p5": 5, "p50": 50, "p95": 95, "max": 100}
BINS = 24
# Facts about the rows: the fraction above which a fact becomes a finding, and its sentence.
FACTS = {
    "duplicate rows": (0.01, "rows that equal another one"),
    "duplicate prompts": (0.2, "prompts that repeat an earlier one"),
    "equal answers": (0.01, "chosen and rejected are the same"),
    "empty answers": (0.0, "answers without any text"),
    "empty prompts": (0.0, "prompts without any text"),
    "control tokens": (
        0.0,
        "control tokens of the model (such as <|im_end|>) typed in a text, which are read as plain text",
    ),
    "damaged text": (0.01, "broken characters (lost encoding or control characters)"),
    "truncated": (0.1, "longer than the token limit and cut"),
    "dropped": (0.05, "left out"),
    "answers cut away": (0.01, "the prompt takes all tokens of the limit, and no answer is left"),
    "negative margins": (0.01, "margins below 0, as if the rejected answer were the better one"),
    "unused rows": (0.1, "is too small for its share"),
    "shared with data": (0.0, "held-out prompts that are also trained on"),
    **PICTURE_FACTS,
}
LIMITS = {name: limit for name, (limit, _) in FACTS.items()}
# with at least FEWEST values, fractions outside these bounds are findings
BALANCE = {"desirable": (0.2, 0.8), "chosen longer": (0.3, 0.7)}
UNBALANCED = {
    "desirable": "the labels are out of balance, desirable answers",
    "chosen longer": "length predicts which answer was chosen, chosen ones that are longer",
}
FEWEST = 20
# kinds whose prompts should not repeat; sampled answers have several rows per prompt
REPEATS = ("sft", "prompt", "preference")
ANSWER_CUT = "no answer within the token limit"


class BuiltItems(NamedTuple):
    """Holds the items built from a row; each item is a tuple of documents and a number.

    `cut` counts truncated items, `rows` is the number of items expected from the row, and `dropped` is the
    reason if there are fewer. Lengths are in tokens before truncation, and None or empty if nothing was
    tokenised. `marks` names further facts about the row.
    """

    items: Sequence[tuple[Sequence[Document], float]]
    cut: int
    rows: int = 1
    dropped: str = ""
    prompt_tokens: int | None = None
    answer_tokens: Sequence[int] = ()
    marks: Sequence[str] = ()


class Finding(Frozen):
    """A fact about a data set that exceeds its limit."""

    name: str
    sentence: str
    example: str = ""


class SourceUse(Frozen):
    """Describes a source of the mixture: its share in the recipe (`asked`) and its number of used rows."""

    path: str
    asked: float
    rows: int


class Survey(Frozen):
    """Holds facts about one data set. `rows` were used from the files, `items` were expected from these rows,
    `kept` were built, and `truncated` of these were cut. `tokens` and `images` are in the kept items (for a
    pair, in both documents). `facts` are fractions of the rows, except statistics of margins and rewards.

    `histogram` has counts of lengths in equal bins, followed by the upper edge of the last bin in tokens; the
    first bin starts at 0.
    """

    kind: str
    limit: int
    rows: int
    items: int
    kept: int
    dropped: dict[str, int]
    sources: tuple[SourceUse, ...]
    lengths: dict[str, dict[str, int]]
    histogram: dict[str, list[int]]
    facts: dict[str, float]
    findings: tuple[Finding, ...]
    truncated: int = 0
    tokens: int = 0
    images: int = 0


@dataclass(frozen=True)
class DataReport:
    """Holds a survey and the digests of all prompts: (N, 3) uint64 with digest, source index, row number."""

    survey: Survey
    prompts: np.ndarray = field(compare=False, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """Returns the numbers of items expected from the rows, kept, truncated (among the kept) and dropped,
        and the number of tokens in kept items."""
        found = self.survey
        dropped = found.items - found.kept
        return {
            "rows": found.items,
            "kept": found.kept,
            "truncated": found.truncated,
            "dropped": dropped,
            "tokens": found.tokens,
        }

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns the counts as metrics `{prefix}/rows`, `{prefix}/kept`, ..."""
        return {f"{prefix}/{name}": float(count) for name, count in self.counts.items()}


class Surveyor:
    """Collects the facts of a data set. Call `see` once per row, then `finish`."""

    def __init__(self, data: Data, kind: Kind, limit: int, control_tokens: re.Pattern[str]):
        self._data = data
        self._kind = kind
        self._limit = limit
        self._control_tokens = control_tokens
        self._prompts = array("Q")
        self._rows = array("Q")  # digests
        self._sources = array("H")
        self._numbers = array("Q")
        self._lengths = {"prompt": array("i"), "answer": array("i")}
        self._margins = array("d")
        self._rewards = array("d")
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._dropped: Counter[str] = Counter()
        self._items = self._kept = self._truncated = self._compared = self._longer = self._labels = (
            self._desirable
        ) = 0

    def see(self, placed: Placed, made: BuiltItems) -> None:
        """Adds a row and the items built from it to the counts."""
        located = placed.located
        self._items += made.rows
        self._kept += len(made.items)
        self._truncated += made.cut
        for name in made.marks:
            self._mark(name, True, located.where)
        if made.dropped:
            self._dropped[made.dropped] += made.rows - len(made.items)
        self._mark("truncated", bool(made.cut), located.where)
        self._mark("dropped", bool(made.dropped), located.where)
        self._mark("answers cut away", made.dropped == ANSWER_CUT, located.where)
        if made.prompt_tokens is not None:
            self._lengths["prompt"].append(made.prompt_tokens)
            self._lengths["answer"].extend(made.answer_tokens)
        answers: list[str] = []
        later: list[str] = []
        if unusable(located, self._kind):
            prompt = located.where  # unique, so that the row does not count as a duplicate
        else:
            prompt, answers, later = self._texts(located)
        self._mark(
            "control tokens",
            self._control_tokens.search("\n".join((prompt, *answers, *later))) is not None,
            located.where,
        )
        self._mark("empty answers", any(not text.strip() for text in answers), located.where)
        self._mark("empty prompts", not prompt.strip(), located.where)
        self._mark("damaged text", any(DAMAGE.search(text) for text in (prompt, *answers)), located.where)
        self._prompts.append(_digest(prompt))
        self._rows.append(_digest(prompt, *answers))
        self._sources.append(placed.source)
        self._numbers.append(placed.number)

    def finish(self, mixture: Mixture | None, tokens: int, images: int = 0) -> DataReport:
        """Returns the report on the rows of `mixture`. `tokens` and `images` are totals of the kept items."""
        rows = len(self._rows)
        columns = ((self._prompts, np.uint64), (self._sources, np.uint16), (self._numbers, np.uint64))
        numbers = np.stack(
            [np.frombuffer(values, dtype=kind).astype(np.uint64) for values, kind in columns], axis=1
        )
        for name, digests in (("duplicate rows", self._rows), ("duplicate prompts", self._prompts)):
            if name == "duplicate rows" and self._kind == "prompt":
                continue  # the whole row is the prompt
            self._count_repeats(name, np.frombuffer(digests, dtype=np.uint64), numbers)
        facts = {
            name: self._counts[name] / rows for name in LIMITS if name in self._counts or name == "truncated"
        }
        findings = [
            Finding(
                name=name,
                sentence=(
                    f"{FACTS[name][1]}: {self._counts[name]} of {rows}"
                    f" rows{self._reasons() if name == 'dropped' else ''}"
                ),
                example=self._examples.get(name, ""),
            )
            for name, limit in LIMITS.items()
            if facts.get(name, 0) > limit and (name != "duplicate prompts" or self._kind in REPEATS)
        ]
        for name, part, whole in (
            ("desirable", self._desirable, self._labels),
            ("chosen longer", self._longer, self._compared),
        ):
            if whole:
                facts[name] = part / whole
                low, high = BALANCE[name]
                if whole >= FEWEST and not low <= part / whole <= high:
                    findings.append(Finding(name=name, sentence=f"{UNBALANCED[name]}: {part} of {whole}"))
        for name, values in (("margin", self._margins), ("reward", self._rewards)):
            if values:
                facts |= {f"{name} {what}": value for what, value in _spread(values).items()}
        findings += self._too_small(mixture, facts)
        used = np.bincount(np.frombuffer(self._sources, dtype=np.uint16), minlength=len(self._data.sources))
        survey = Survey(
            kind=self._kind,
            limit=self._limit,
            rows=rows,
            items=self._items,
            kept=self._kept,
            dropped=dict(self._dropped),
            sources=tuple(
                SourceUse(path=source.path, asked=source.probability, rows=int(count))
                for source, count in zip(self._data.sources, used, strict=True)
            ),
            lengths={name: _quantiles(lengths) for name, lengths in self._lengths.items() if lengths},
            histogram=_histogram(self._lengths),
            facts=facts,
            findings=tuple(findings),
            truncated=self._truncated,
            tokens=tokens,
            images=images,
        )
        return DataReport(survey, numbers)

    def _texts(self, located: Located) -> tuple[str, list[str], list[str]]:
        """Returns the prompt, the answers, and the messages between answers as strings. Also counts labels,
        margins, rewards and comparisons."""
        if self._kind == "sft":
            messages = conversation_of(located)
            first = next(
                (i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages)
            )
            after = messages[first:]
            answers = [written(message) for message in after if message["role"] == "assistant"]
            return (
                as_text(messages[:first]),
                answers,
                [content_text(message["content"]) for message in after if message["role"] != "assistant"],
            )
        if self._kind == "prompt":
            return as_text(pictured_prompt_of(located)), [], []
        if self._kind == "labelled":
            prompt, labelled = labelled_of(located)
            self._labels += len(labelled)
            self._desirable += sum(label for _, label in labelled)
            answers = [written(answer) for answer, _ in labelled]
        elif self._kind == "preference":
            preference = preference_of(located)
            prompt = preference.prompt
            answers = [written(preference.chosen), written(preference.rejected)]
            if located.row.get("margin") is not None:
                self._margins.append(preference.margin)
                self._mark("negative margins", preference.margin < 0, located.where)
        else:
            prompt, answer = prompt_and_answer(located)
            answers = [answer]
            if self._kind == "scored":
                self._rewards.append(reward_of(located))
        if len(answers) == 2:
            self._mark("equal answers", answers[0] == answers[1], located.where)
            if len(answers[0]) != len(answers[1]):
                self._compared += 1
                self._longer += len(answers[0]) > len(answers[1])
        return as_text(prompt), answers, []

    def _reasons(self) -> str:
        return f" ({', '.join(f'{why}: {count}' for why, count in self._dropped.most_common())})"

    def _mark(self, name: str, here: bool, where: str) -> None:
        if here:
            self._counts[name] += 1
            self._examples.setdefault(name, where)

    def _count_repeats(self, name: str, digests: np.ndarray, numbers: np.ndarray) -> None:
        order = np.argsort(digests, kind="stable")
        again = np.flatnonzero(digests[order][1:] == digests[order][:-1]) + 1
        if len(again):
            later = int(again[np.argmin(order[again])])
            self._counts[name] = len(again)
            self._examples[name] = (
                f"{self._where(numbers[order[later]])}, which repeats"
                f" {self._where(numbers[order[later - 1]])}"
            )

    def _where(self, number: np.ndarray) -> str:
        return f"{self._data.sources[int(number[1])].path}, row {int(number[2])}"

    def _too_small(self, mixture: Mixture | None, facts: dict[str, float]) -> list[Finding]:
        if mixture is None or mixture.ended_by is None:
            return []
        source = self._data.sources[mixture.ended_by]
        facts["unused rows"] = mixture.left / (mixture.left + mixture.rows)
        if facts["unused rows"] <= LIMITS["unused rows"]:
            return []
        sentence = (
            f"{source.path} {FACTS['unused rows'][1]} of {source.probability:g}: the mixture ends after"
            f" {mixture.rows} rows and leaves {mixture.left} rows of the other sources unused"
        )
        return [Finding(name="unused rows", sentence=sentence)]


def shared_prompts(train: DataReport, held_out: DataReport) -> tuple[float, Finding | None]:
    """Returns the fraction of held-out prompts that are also in the training data, and a finding if the
    fraction is above the limit, otherwise None."""
    same = np.flatnonzero(np.isin(held_out.prompts[:, 0], train.prompts[:, 0]))
    share = len(same) / len(held_out.prompts)
    total = len(held_out.prompts)
    if share <= LIMITS["shared with data"]:
        return share, None
    _, source, number = held_out.prompts[same[0]]
    sentence = f"{FACTS['shared with data'][1]}: {len(same)} of {total} rows"
    example = f"{held_out.survey.sources[int(source)].path}, row {int(number)}"
    return share, Finding(name="shared with data", sentence=sentence, example=example)


def _digest(*texts: str) -> int:
    content = "\x00".join(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _spread(values: array[float]) -> dict[str, float]:
    numbers = np.frombuffer(values, dtype=np.float64)
    return {name: float(getattr(numbers, name)()) for name in ("min", "mean", "std", "max")}


def _quantiles(lengths: array[int]) -> dict[str, int]:
    numbers = np.frombuffer(lengths, dtype=np.int32)
    return {name: int(np.percentile(numbers, q, method="inverted_cdf")) for name, q in PERCENTILES.items()}


def _histogram(lengths: dict[str, array[int]]) -> dict[str, list[int]]:
    longest = max((max(values) for values in lengths.values() if values), default=0)
    edge = -(-max(longest, 1) // BINS) * BINS
    return {
        name: [*np.histogram(values, BINS, (0, edge))[0].tolist(), edge]
        for name, values in lengths.items()
        if values
    }


class Loaded(NamedTuple, Generic[Item]):
    """Holds items in the order of the data, and their report. `sources` holds the index of each prompt's
    source, for prompts."""

    items: Sequence[Item]
    report: DataReport
    sources: Sequence[int] = ()
