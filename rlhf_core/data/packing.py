"""Packs documents into rows and forward passes: best-fit-decreasing bin packing (Johnson 1974; Ding et al.
2024). Torch-free.

Documents are never split. Rows with the longest documents come first, so shuffle the rows before training.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rlhf_core.data.documents import Document, Lazy, Pair

Item = TypeVar("Item")
# The most keys and values that a pass gathers per token of its own. The limit keeps their memory small
# compared with the memory of the pass.
KEYS = 3


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns bins of indices into `lengths` (tokens). No bin exceeds `capacity` tokens, and every index is
    in exactly one bin.

    Each document, longest first, goes into the bin where it leaves the least space, or into a new bin.
    Deterministic, in about n log n. Raises ValueError for a length under 1 or over `capacity`.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"document {index} has {length} tokens: packing takes 1 to {capacity}, cut or drop it before"
            )
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # free tokens -> bins with exactly that many
    spaces: list[int] = []  # keys of with_space, sorted: at most `capacity` of them
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(spaces, lengths[index])
        if at < len(spaces):
            space = spaces[at]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        else:
            space = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(index)
        left = space - lengths[index]
        if left > 0:
            if left not in with_space:
                with_space[left] = []
                insort(spaces, left)
            with_space[left].append(chosen)
    return bins


def evenly(lengths: Sequence[int], budget: int, multiple: int) -> list[list[int]]:
    """Returns the indices, split into as few parts of at most `budget` tokens as possible, with about equal
    numbers of tokens.

    The number of parts is a multiple of `multiple`, or the number of lengths if that is smaller. Puts each
    index, longest first, into the part with the fewest tokens (LPT; Graham 1969), or uses best fit if that
    needs fewer parts. A length over the budget raises the budget. Deterministic.
    """
    budget = max(budget, *lengths)
    # Lower bounds: at most k - 1 lengths over budget / k fit into one part.
    fewest = (-(-sum(length * k > budget for length in lengths) // (k - 1)) for k in range(2, 9))
    count = max(-(-sum(lengths) // budget), *fewest)
    tight = None
    while True:
        count = min(-(-count // multiple) * multiple, len(lengths))
        parts: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, part) for part in range(count)]
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            load, part = loads[0]
            parts[part].append(index)
            heapq.heapreplace(loads, (load + lengths[index], part))
        if max(loads)[0] <= budget:
            return parts
        tight = tight or best_fit(lengths, budget)
        if len(tight) == count:
            return tight
        count += 1


def consecutive(documents: Sequence[Document], width: int) -> list[list[Document]]:
    """Returns rows of consecutive documents, in order. A row has at most `width` tokens, or at most as many
    as the longest document if that is longer than `width`."""
    width = max([width, *map(len, documents)])
    rows: list[list[Document]] = []
    held = width
    for document in documents:
        held += len(document)
        if held > width:
            rows.append([])
            held = len(document)
        rows[-1].append(document)
    return rows


class Parts(Lazy[list[Item]]):
    """Represents a sequence of consecutive parts of `items`, each read on access. `starts` holds the index of
    each part's first item."""

    def __init__(self, items: Sequence[Item], starts: Sequence[int]):
        self.starts = starts
        self._ends = array("q", starts[1:])
        self._ends.append(len(items))
        super().__init__(len(starts), lambda part: list(items[starts[part] : self._ends[part]]))


class Passes(NamedTuple):
    """Describes how documents are grouped into forward passes: `rows` padded documents or, with `tokens`, one
    row of at most `tokens` tokens.

    The other fields apply only with `tokens`. With `width`, a pass has several rows, each of at most `width`
    tokens, or at most as many as the pass's longest document if that is longer. This suits attention that
    computes whole rows and masks other documents. The number of passes is a multiple of `ranks` if there are
    enough documents, so that no rank waits for another. With `share`, a prompt that a document shares with an
    earlier one is stored once (`Document.shared`). With `apart`, each document has its own row, and a pass
    has at most `tokens` tokens including padding.
    """

    rows: int
    tokens: int | None = None
    ranks: int = 1
    share: bool = False
    apart: bool = False
    width: int | None = None

    def split(self, items: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
        """Returns the items of each pass. `length` returns an item's number of tokens. With `rows` the items
        stay in order; with `apart` the longest come first."""
        if self.tokens is None:
            return [list(items[i : i + self.rows]) for i in range(0, len(items), self.rows)]
        if not items:
            return []
        if self.apart:
            return list(self.in_order(sorted(items, key=length, reverse=True), length))
        return [
            [items[i] for i in part]
            for part in evenly([length(item) for item in items], self.tokens, self.ranks)
        ]

    def in_order(self, items: Sequence[Item], length: Callable[[Item], int]) -> Parts[Item]:
        """Returns passes of consecutive items, read on access. With `tokens`, a pass has as many items as
        fit, and at least one."""
        if self.tokens is None:
            return Parts(items, array("q", range(0, len(items), self.rows)))
        starts = array("q")
        held = self.tokens
        longest = 0
        for index, item in enumerate(items):
            size = length(item)
            longest = max(longest, size)
            held = (index - starts[-1] + 1) * longest if self.apart and starts else held + size
            if held > self.tokens:
                starts.append(index)
                held = longest = size
        return Parts(items, starts)

    def rows_of(self, documents: Sequence[Document]) -> list[list[Document]]:
        """Returns the rows of a pass. With `apart`, raises ValueError for a document with several
        sequences."""
        if self.apart and any(document.starts for document in documents):
            raise ValueError(
                "an episode has several conversations, which this model cannot keep apart in one row: take"
                " another model, or an agent that only adds to its conversation"
            )
        if self.tokens is None or self.apart:
            return [[document] for document in documents]
        return [self.branched(documents)] if self.width is None else consecutive(documents, self.width)

    def branched(self, documents: Sequence[Document]) -> list[Document]:
        """Returns the documents of one row. With `share`, a document shares its prompt with the last unshared
        document before it if their prompts are equal."""
        if not self.share or self.tokens is None:
            return list(documents)
        row: list[Document] = []
        trunk: Document | None = None
        for document in documents:
            row.append(document.after(trunk) if trunk is not None else document)
            trunk = trunk if row[-1].shared else document
        return row

    def row_tokens(self, pair: Pair) -> int:
        """Returns the number of tokens that a pair takes in one row, or in two padded rows."""
        if self.apart:
            return 2 * max(len(pair.chosen), len(pair.rejected))
        return sum(
            len(document) - document.shared for document in self.branched((pair.chosen, pair.rejected))
        )

    def together(self, documents: Sequence[Document]) -> list[list[int]]:
        """Returns groups of the indices of documents that share a prompt, longest first. Without `share`,
        each index is a separate group.

        With several ranks, a group has at most half of a rank's tokens, so that all ranks receive parts of
        equal size. A group attends to at most `KEYS` times its own tokens.
        """
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        if not self.share or self.tokens is None:
            return [[i] for i in order]
        prompts = [
            tuple(document.tokens[: len(document) if document.starts else document.answer_start])
            for document in documents
        ]
        total = sum(map(len, set(prompts))) + sum(
            len(document) - document.answer_start for document in documents
        )
        limit = self.tokens if self.ranks == 1 else min(self.tokens, -(-total // (2 * self.ranks)))
        # prompt -> its open group, the group's tokens, the tokens it attends to
        newest: dict[tuple[int, ...], tuple[list[int], int, int]] = {}
        groups: list[list[int]] = []
        for i in order:
            whole = len(documents[i])
            group, held, keys = newest.get(prompts[i], ([], 0, 0))
            own = whole - len(prompts[i])
            if not group or not 0 < own < whole or held + own > limit or keys + whole > KEYS * (held + own):
                group = []
                held = 0
                keys = 0
                own = whole
                groups.append(group)
            group.append(i)
            newest[prompts[i]] = (group, held + own, keys + whole)
        return groups
