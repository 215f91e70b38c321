"""Assigns pairs to annotators and turns their choices into labels.

A pair is assigned until `per_item` annotators have labelled it; only then does the next pair begin. For each
pair and annotator, a draw decides which answer is on the left. A fraction of an annotator's pairs is shown a
second time, with the answers swapped, after GAP other pairs. Assignments follow from the labels, so a killed
server can continue and loses only the reservations of pairs that pages are showing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from evaluation.labelling.label_records import LABELS, ComparedPair, HumanLabel, Side, in_force
from evaluation.labelling.label_store import LabelFile

GAP = 10  # labels of other pairs before a pair is shown again
HOLD_SECONDS = 900.0  # time for which a pair shown by a page stays reserved
NAME_LENGTH = 40
MOST_HOLDS = 200  # names with a reserved pair; anybody with the page's address can use any name


class Stale(Exception):
    """Raised when a page shows a pair that its annotator has already labelled or that this server did not
    assign."""


class LabelTask(NamedTuple):
    """A pair as one annotator sees it. `id` reveals neither the pair, nor its models, nor which answer is on
    the left."""

    id: str
    pair: ComparedPair
    shown_first: Side
    repeat_of: str | None


class Progress(NamedTuple):
    """Counts of one annotator's pairs. `left`: number of pairs still to be assigned."""

    labelled: int
    skipped: int
    left: int


class _Hold(NamedTuple):
    key: str
    until: float


@dataclass(frozen=True)
class Rules:
    """The rules of assignment. `per_item`: annotators per pair; `repeat`: the fraction of pairs that an
    annotator is shown twice; `seed`: the seed that decides which answer is on the left and which pairs are
    repeated."""

    per_item: int = 2
    repeat: float = 0.05
    seed: int = 0


class Assignment:
    """Tracks which annotator labelled which pair. Not thread-safe; the server calls it from its event
    loop."""

    def __init__(
        self,
        pairs: Sequence[ComparedPair],
        file: LabelFile,
        rules: Rules,
        secret: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares the assignment from the labels in `file`. `secret`, which no page or annotator knows,
        prevents anyone from computing task ids and the order of the answers from texts, names and the
        seed."""
        self.pairs = {pair.key: pair for pair in pairs}
        self.file = file
        self.rules = rules
        self._secret = secret.encode()
        self._clock = clock
        # by annotator and key, in label order
        self._firsts: defaultdict[str, dict[str, HumanLabel]] = defaultdict(dict)
        self._repeats: defaultdict[str, dict[str, HumanLabel]] = defaultdict(dict)
        self._decided: Counter[str] = Counter()  # number of annotators who gave a verdict, by key
        self._holds: dict[str, _Hold] = {}
        for label in in_force(file.labels):
            self._count(label)

    @property
    def annotators(self) -> list[str]:
        """Returns the names in the file and on open pages, sorted."""
        return sorted({*(label.annotator for label in self.file.labels), *self._holds})

    @property
    def finished(self) -> int:
        """Returns the number of pairs with enough labels."""
        return sum(self._decided[key] >= self.rules.per_item for key in self.pairs)

    def known_name(self, text: str) -> str:
        """Returns an annotator's name, in the spelling of earlier labels. Raises ValueError when the name
        is invalid."""
        name = " ".join(unicodedata.normalize("NFC", text).split())
        if not name or len(name) > NAME_LENGTH or not name.isprintable():
            raise ValueError(f"give a name of 1 to {NAME_LENGTH} letters")
        return next((known for known in self.annotators if known.casefold() == name.casefold()), name)

    def progress(self, annotator: str) -> Progress:
        mine = self._firsts.get(annotator, {})
        skipped = sum(label.verdict is None for label in mine.values())
        return Progress(len(mine) - skipped, skipped, len(self._open(annotator)))

    def next(self, annotator: str) -> LabelTask | None:
        """Returns the next task for an annotator and reserves its pair; None if nothing is left. Repeated
        calls return the same task."""
        held = self._holds.get(annotator)
        if (
            held is not None
            and held.key in self.pairs
            and (task := self._task(annotator, held.key)) is not None
        ):
            return self._given(annotator, task)
        for first in list(self._firsts.get(annotator, {}).values())[:-GAP]:
            if self._comes_again(annotator, first) and (task := self._task(annotator, first.key)) is not None:
                return self._given(annotator, task)
        open_keys = self._open(annotator)
        if not open_keys:
            self._holds.pop(annotator, None)
            return None
        others = self._held_by_others(annotator)
        # the first of the pairs with the most labels
        key = max(open_keys, key=lambda key: self._decided[key] + others[key])
        task = self._task(annotator, key)
        assert task is not None, "an open pair has no label of this annotator"
        return self._given(annotator, task)

    def label(
        self, annotator: str, task_id: str, choice: int | None, seconds: float, note: str | None = None
    ) -> HumanLabel:
        """Writes the verdict on a task and returns the label. `choice`: index in LABELS, with the left answer
        as A; None if the task was skipped.

        Raises Stale when the task is not open for this annotator, and OSError when the label cannot be
        written.
        """
        task = self._by_id(annotator, task_id)
        if task is None:
            raise Stale("this pair is already labelled, or did not come from this server")
        place = choice if choice is None or task.shown_first == "a" else len(LABELS) - 1 - choice
        label = HumanLabel(
            **task.pair.model_dump(),
            id=secrets.token_hex(8),
            verdict=None if place is None else LABELS[place],
            shown_first=task.shown_first,
            annotator=annotator,
            at=_now(),
            seconds=round(seconds, 3),
            note=note or None,
            repeat_of=task.repeat_of,
        )
        self.file.append(label)
        self._count(label)
        self._holds.pop(annotator, None)
        return label

    def undo(self, annotator: str) -> HumanLabel | None:
        """Withdraws an annotator's last label and reserves its pair, so that `next` returns that pair again.
        Returns None if there is no label."""
        mine = [
            label
            for table in (self._firsts, self._repeats)
            for label in table.get(annotator, {}).values()
            if label.key in self.pairs
        ]
        if not mine:
            return None
        places = {label.id: place for place, label in enumerate(self.file.labels)}
        last = max(mine, key=lambda label: places[label.id])
        own = {
            "id": secrets.token_hex(8),
            "undone": last.id,
            "verdict": None,
            "note": None,
            "seconds": 0.0,
            "at": _now(),
        }
        self.file.append(last.model_copy(update=own))
        del self._table(last)[annotator][last.key]
        self._decided[last.key] -= last.verdict is not None and last.repeat_of is None
        self._holds[annotator] = _Hold(last.key, self._clock() + HOLD_SECONDS)
        return last

    def _count(self, label: HumanLabel) -> None:
        self._table(label)[label.annotator][label.key] = label
        self._decided[label.key] += label.verdict is not None and label.repeat_of is None

    def _table(self, label: HumanLabel) -> defaultdict[str, dict[str, HumanLabel]]:
        return self._firsts if label.repeat_of is None else self._repeats

    def _open(self, annotator: str) -> list[str]:
        """Returns the keys of the pairs that this annotator may start, in the order in which they were
        drawn."""
        others = self._held_by_others(annotator)
        mine = self._firsts.get(annotator, {})
        return [
            key
            for key in self.pairs
            if key not in mine and self._decided[key] + others[key] < self.rules.per_item
        ]

    def _held_by_others(self, annotator: str) -> Counter[str]:
        now = self._clock()
        holds = {name: hold for name, hold in self._holds.items() if name != annotator and hold.until > now}
        return Counter(hold.key for name, hold in holds.items() if hold.key not in self._firsts.get(name, {}))

    def _given(self, annotator: str, task: LabelTask) -> LabelTask:
        self._holds.pop(annotator, None)  # so that the newest is last
        self._holds[annotator] = _Hold(task.pair.key, self._clock() + HOLD_SECONDS)
        while len(self._holds) > MOST_HOLDS:
            del self._holds[next(iter(self._holds))]
        return task

    def _comes_again(self, annotator: str, first: HumanLabel) -> bool:
        decided = first.verdict is not None and first.key in self.pairs
        return decided and self._drawn("repeat", annotator, first.key) < self.rules.repeat

    def _task(self, annotator: str, key: str) -> LabelTask | None:
        """Returns an annotator's task for a pair: the first task, or the repeat if the pair is shown twice;
        None when both are labelled."""
        first = self._firsts.get(annotator, {}).get(key)
        if first is None:
            side: Side = "a" if self._drawn("side", annotator, key) < 0.5 else "b"
            return LabelTask(self._id(annotator, key, side, ""), self.pairs[key], side, None)
        if key in self._repeats.get(annotator, {}) or not self._comes_again(annotator, first):
            return None
        other: Side = "b" if first.shown_first == "a" else "a"
        return LabelTask(self._id(annotator, key, other, first.id), self.pairs[key], other, first.id)

    def _by_id(self, annotator: str, task_id: str) -> LabelTask | None:
        held = self._holds.get(annotator)
        # try the likely one first
        keys = [held.key, *self.pairs] if held is not None and held.key in self.pairs else list(self.pairs)
        tasks = (self._task(annotator, key) for key in keys)
        return next((task for task in tasks if task is not None and task.id == task_id), None)

    def _drawn(self, what: str, annotator: str, key: str) -> float:
        """Returns a number in [0, 1) that is the same after a restart."""
        return _drawn(self._secret, self.rules.seed, what, annotator, key)

    def _id(self, annotator: str, key: str, side: Side, repeat_of: str) -> str:
        text = json.dumps([annotator, key, side, repeat_of])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:24]


@lru_cache(1 << 17)
def _drawn(secret: bytes, seed: int, what: str, annotator: str, key: str) -> float:
    text = json.dumps([seed, what, annotator, key])
    return int(hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()[:8], 16) / 2**32


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
