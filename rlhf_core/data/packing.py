"""Which documents share a row: best-fit-decreasing bin packing (Johnson 1974), as used for training by Ding et al. 2024. Torch-free.

Documents are never split. The longest come first, so the rows do not come in a random order: shuffle them before training.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


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
