"""Passes experience to the ranks that train. Passes data that the nodes already hold by reference, so that
nothing is sent to a node twice.

Documents and the sampler's log-probs are put on the nodes while the models score. Results of models stay
where their ranks stored them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo.rollout_records import Experience, StoredColumn

EMPTY = Document([], [])
READ = {  # fields of Experience, by the role that trains on them
    "actor": ("document", "old_logprobs", "sampler_logprobs", "ref_logprobs", "teacher"),
    "critic": ("document", "values"),
}
MOST = 20_000  # most references in the calls of all ranks; the driver passes about 20,000 per second


def read_by(role: str, columns: Sequence[StoredColumn]) -> tuple[list[StoredColumn], list[Any]]:
    """Returns the columns that a role trains on, without their references, and the references separately. Ray
    fetches a reference only if it is itself an argument of a call."""
    read = [column for column in columns if column.field in READ[role]]
    return [column._replace(reference=None) for column in read], [column.reference for column in read]


def by_reference(
    experience: Sequence[Experience], stored: Sequence[StoredColumn], ranks: int
) -> tuple[list[Experience], list[StoredColumn]]:
    """Returns the experience without its `stored` fields, and the columns that hold them. Only fields that
    are not None in the experience have a column. Removes nothing if too many references would go to the
    `ranks`, for example with hundreds of ranks that score many parts."""
    held = [column for column in stored if getattr(experience[0], column.field) is not None]
    if not held or len(held) * ranks > MOST:
        return list(experience), []
    empty: dict[str, Any] = {column.field: EMPTY if column.field == "document" else None for column in held}
    return [replace(one, **empty) for one in experience], held


def joined(
    experience: Sequence[Experience], places: Sequence[StoredColumn], stored: Sequence[Any]
) -> list[Experience]:
    """Returns the experience with `stored`, the data behind the references, put back. Arrays are not copied
    and are read-only."""
    columns: dict[str, list[Any]] = {place.field: [None] * len(experience) for place in places}
    for place, found in zip(places, stored, strict=True):
        for i, value in found[0] if place.scored else enumerate(found):
            columns[place.field][place.start + i] = value
    assert all(value is not None for column in columns.values() for value in column), (
        "references are not those of the experience"
    )
    rows = zip(*columns.values(), strict=True)
    whole = [
        replace(one, **dict(zip(columns, row, strict=True)))
        for one, row in zip(experience, rows, strict=True)
    ]
    for one in whole:
        arrays = [values for values in vars(one).values() if isinstance(values, np.ndarray)]
        assert all(len(array) == len(one.document) for array in arrays), "arrays are of other documents"
    return whole
