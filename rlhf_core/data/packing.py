"""Which documents share a row: best-fit-decreasing bin packing (Johnson 1974), as used for training by Ding et al. 2024. Torch-free.

Documents are never split. The longest come first, so the rows do not come in a random order: shuffle them before training.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from rlhf_core.data.documents import Document, Lazy, Pair

Item = TypeVar("Item")
KEYS = 3  # keys and values that a pass gathers, by its tokens: their memory is a small part of what a pass keeps


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths` (tokens), no bin over `capacity` tokens, every index in exactly one bin.

    Each document, the longest first, goes where it leaves the least room; a new bin opens when none has room. Deterministic; about
    n log n. Raises ValueError for a length under 1 or over `capacity`.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"document {index} has {length} tokens: packing takes 1 to {capacity}, cut or drop it before")
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> bins with exactly this room
    rooms: list[int] = []  # keys of with_room, sorted: at most `capacity` of them
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[index])
        if at < len(rooms):
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        left = room - lengths[index]
        if left > 0:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(chosen)
    return bins


def evenly(lengths: Sequence[int], budget: int, multiple: int) -> list[list[int]]:
    """As few parts of indices as hold at most `budget` tokens each, a multiple of `multiple`, with about equally many tokens in each.

    The longest first, each to the part with the fewest tokens (LPT; Graham 1969); where that takes more parts than best fit, best fit.
    A length over the budget raises the budget to it. There are never more parts than lengths. Deterministic.
    """
    budget = max(budget, *lengths)
    # Of lengths over the k-th part of the budget at most k - 1 fit together.
    fewest = (-(-sum(length * k > budget for length in lengths) // (k - 1)) for k in range(2, 9))
    count, tight = max(-(-sum(lengths) // budget), *fewest), None
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


class Parts(Lazy[list[Item]]):
    """Consecutive parts of `items`, each read when it is asked for; `starts` has the index of the first item of each."""

    def __init__(self, items: Sequence[Item], starts: Sequence[int]):
        self.starts, self._ends = starts, array("q", starts[1:])
        self._ends.append(len(items))
        super().__init__(len(starts), lambda part: list(items[starts[part] : self._ends[part]]))


class Passes(NamedTuple):
    """How documents share forward passes: `rows` of them, each padded to the longest; or, with `tokens`, one row of at most so many.

    `ranks`: with `tokens`, passes are a multiple of it where there are enough documents, so that no rank waits for another.
    `share`: with `tokens`, a prompt that a document has in common with one before it is laid once (`Document.shared`).
    """

    rows: int
    tokens: int | None = None
    ranks: int = 1
    share: bool = False

    def split(self, items: Sequence[Item], length: Callable[[Item], int]) -> list[list[Item]]:
        """The items of each pass; `length` gives an item's tokens. With `rows` in order."""
        if self.tokens is None:
            return [list(items[i : i + self.rows]) for i in range(0, len(items), self.rows)]
        if not items:
            return []
        return [[items[i] for i in part] for part in evenly([length(item) for item in items], self.tokens, self.ranks)]

    def in_order(self, items: Sequence[Item], length: Callable[[Item], int]) -> Parts[Item]:
        """Consecutive items of each pass, read when they are asked for; with `tokens` as many as fit, at least one."""
        if self.tokens is None:
            return Parts(items, array("q", range(0, len(items), self.rows)))
        starts, held = array("q"), self.tokens
        for index, item in enumerate(items):
            size = length(item)
            held += size
            if held > self.tokens:
                starts.append(index)
                held = size
        return Parts(items, starts)

    def lay(self, documents: Sequence[Document]) -> list[list[Document]]:
        """The rows of a pass."""
        return [[document] for document in documents] if self.tokens is None else [self.branched(documents)]

    def branched(self, documents: Sequence[Document]) -> list[Document]:
        """Documents of one row, those that have the prompt of one before them going on from it."""
        if not self.share or self.tokens is None:
            return list(documents)
        row: list[Document] = []
        trunk: Document | None = None
        for document in documents:
            row.append(document.after(trunk) if trunk is not None else document)
            trunk = trunk if row[-1].shared else document
        return row

    def laid(self, pair: Pair) -> int:
        """Tokens that a pair takes in a row."""
        return sum(len(document) - document.shared for document in self.branched((pair.chosen, pair.rejected)))

    def together(self, documents: Sequence[Document]) -> list[list[int]]:
        """Indices of documents that share a prompt, the longest first; with nothing to share each alone.

        Among several ranks a group has at most half of what each has to do, so that they get equal parts. None attends to more than `KEYS`
        times its own tokens.
        """
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        if not self.share or self.tokens is None:
            return [[i] for i in order]
        prompts = [tuple(document.tokens[: document.answer_start]) for document in documents]
        laid = sum(map(len, set(prompts))) + sum(len(document) - document.answer_start for document in documents)
        limit = self.tokens if self.ranks == 1 else min(self.tokens, -(-laid // (2 * self.ranks)))
        newest: dict[tuple[int, ...], tuple[list[int], int, int]] = {}  # group of a prompt, its tokens, and those that it attends to
        groups: list[list[int]] = []
        for i in order:
            whole = len(documents[i])
            group, held, keys = newest.get(prompts[i], ([], 0, 0))
            own = whole - len(prompts[i])
            if not group or not 0 < own < whole or held + own > limit or keys + whole > KEYS * (held + own):
                group, held, keys, own = [], 0, 0, whole
                groups.append(group)
            group.append(i)
            newest[prompts[i]] = (group, held + own, keys + whole)
        return groups
