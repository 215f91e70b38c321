"""Passes experience to the ranks that train. Data that the nodes already have is passed by reference, so that
nothing is sent to a node twice.

Documents and the sampler's log-probs are put on the nodes while models score. Results of models stay where
their ranks stored them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.rollout_records import Experience, StoredRollouts

EMPTY = Document([], [])
READ = {  # fields of Experience, by the role that trains on them
    "actor": ("document", "old_logprobs", "sampler_logprobs", "ref_logprobs"),
    "critic": ("document", "values"),
}
MOST = 20_000  # references in the calls of all ranks; the driver passes about 20,000 per second


class StoredColumn(NamedTuple):
    """Describes a reference's contents: a field of the rollouts from index `start` on, in the form of
    `scored` or `lists` in `StoredRollouts`."""

    field: str
    start: int
    scored: bool


class Sent(NamedTuple):
    """Holds experience without the data that references hold, and these references with their places."""

    experience: list[Experience]
    places: list[StoredColumn]
    references: list[Any]

    def read_by(self, role: str) -> tuple[list[StoredColumn], list[Any]]:
        """Returns places and references of the fields that a role trains on."""
        pairs = [
            pair for pair in zip(self.places, self.references, strict=True) if pair[0].field in READ[role]
        ]
        return [place for place, _ in pairs], [reference for _, reference in pairs]


def by_reference(experience: Sequence[Experience], parts: Sequence[StoredRollouts], ranks: int) -> Sent:
    """Removes from experience the fields that all `parts` have; the parts are consecutive. Fields that are
    None in the experience get no reference. Removes nothing if too many references would go to the `ranks`,
    as with hundreds of ranks that score many parts."""
    assert not parts or sum(part.size for part in parts) == len(experience), (
        "parts are not those of the experience"
    )
    held: list[tuple[StoredColumn, Any]] = []
    start = 0
    for part in parts:
        held += [(StoredColumn(field, start, False), reference) for field, reference in part.lists.items()]
        held += [
            (StoredColumn(field, start, True), reference)
            for field, results in part.scored.items()
            for reference in results
        ]
        start += part.size
    held = [
        (place, reference) for place, reference in held if getattr(experience[0], place.field) is not None
    ]
    if not held or len(held) * ranks > MOST:
        return Sent(list(experience), [], [])
    empty: dict[str, Any] = {place.field: EMPTY if place.field == "document" else None for place, _ in held}
    return Sent(
        [replace(one, **empty) for one in experience],
        [place for place, _ in held],
        [reference for _, reference in held],
    )


def joined(
    experience: Sequence[Experience], places: Sequence[StoredColumn], stored: Sequence[Any]
) -> list[Experience]:
    """Puts the data of the references back into experience. Arrays are not copied and are read-only."""
    columns: dict[str, list[Any]] = {place.field: [None] * len(experience) for place in places}
    for place, found in zip(places, stored, strict=True):
        for i, value in found[0] if place.scored else enumerate(found):
            columns[place.field][place.start + i] = value
    rows = zip(*columns.values(), strict=True)
    whole = [
        replace(one, **dict(zip(columns, row, strict=True)))
        for one, row in zip(experience, rows, strict=True)
    ]
    for one in whole:
        arrays = [values for values in vars(one).values() if isinstance(values, np.ndarray)]
        assert all(len(array) == len(one.document) for array in arrays), "arrays are of other documents"
    return whole
