"""What goes to the ranks that train by reference: of several parts and ranks, only what was to travel, and of
the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_core.data.documents import Document
from rlhf_core.stages.ppo import by_reference as by_reference_module
from rlhf_core.stages.ppo.by_reference import EMPTY, by_reference, joined, read_by
from rlhf_core.stages.ppo.rollout_records import Experience, StoredColumn

LENGTHS = (2, 5, 3, 4)
DOCUMENTS = [Document(list(range(n)), [False, *[True] * (n - 1)]) for n in LENGTHS]
LOGPROBS = [np.arange(n, dtype=np.float32) - i for i, n in enumerate(LENGTHS)]
WHOLE = [
    Experience(d, old, None, old + 1, None, 0.5, None) for d, old in zip(DOCUMENTS, LOGPROBS, strict=True)
]


def part(here: slice, fields: Sequence[str] = ("old_logprobs", "ref_logprobs")) -> list[StoredColumn]:
    """Values in place of references. Two ranks have scored; log-probs of the sampler are on the nodes though
    no loss reads them."""
    pairs = list(enumerate(LOGPROBS[here]))
    lists = {"document": DOCUMENTS[here], "sampler_logprobs": LOGPROBS[here]}
    return [StoredColumn(name, here.start, False, known) for name, known in lists.items()] + [
        StoredColumn(name, here.start, True, ([(i, row + (name == "ref_logprobs")) for i, row in share], 1.0))
        for name in fields
        for share in (pairs[1::2], pairs[::2])
    ]


STORED = [*part(slice(0, 3)), *part(slice(3, 4))]


def same(found: Sequence[Experience], expected: Sequence[Experience]) -> bool:
    pairs = zip(map(values, found), map(values, expected), strict=True)
    return all(np.array_equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def values(one: Experience) -> list[Any]:
    return [
        np.zeros(0) if value is None else value for name, value in vars(one).items() if name != "document"
    ] + [one.document.tokens]


def test_parts_and_ranks_are_joined_in_order() -> None:
    left, held = by_reference(WHOLE, STORED, 2)
    assert all(one == Experience(EMPTY, None, None, None, None, 0.5, None) for one in left)
    places, references = read_by("actor", held)
    assert same(joined(left, places, references), WHOLE) and not same(WHOLE[1:2], WHOLE[:1])
    assert {place.field for place in places} == {
        "document",
        "old_logprobs",
        "ref_logprobs",
    }, "what no loss reads stays away"
    assert {place.field for place in read_by("critic", held)[0]} == {"document"}


def test_what_is_not_on_the_nodes_is_sent() -> None:
    unscored = [*part(slice(0, 3), ["old_logprobs"]), *part(slice(3, 4), ["old_logprobs"])]
    left, held = by_reference(WHOLE, unscored, 2)
    assert all(one.ref_logprobs is not None and one.old_logprobs is None for one in left)
    assert same(joined(left, *read_by("actor", held)), WHOLE)
    assert by_reference(WHOLE, [], 2) == (WHOLE, [])


def test_too_many_references_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_reference_module, "MOST", 20)
    assert len(by_reference(WHOLE, STORED, 2)[1]) == 10
    assert by_reference(WHOLE, STORED, 3) == (WHOLE, [])


def test_arrays_of_other_documents_are_noticed() -> None:
    left, held = by_reference(WHOLE, STORED, 1)
    places, references = read_by("actor", held)
    with pytest.raises(AssertionError, match="of other documents"):
        joined(left, places, [references[0][::-1], *references[1:]])
    with pytest.raises(AssertionError, match="not those of the experience"):
        joined(left, *read_by("actor", [column for column in held if not column.start]))
    with pytest.raises(AssertionError, match="of other documents"):
        joined([replace(one, returns=np.zeros(9)) for one in left], places, references)
