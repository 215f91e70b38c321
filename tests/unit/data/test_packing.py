from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data import packing
from rlhf_core.data.documents import Document, Pair
from rlhf_core.data.packing import Passes, best_fit, evenly


def quadratic_best_fit_room(lengths: list[int], capacity: int) -> list[int]:
    """Rooms left by best-fit-decreasing, written the slow and obvious way."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 50), max_size=80))
def test_every_document_once_and_the_rooms_of_the_obvious_algorithm(lengths: list[int]) -> None:
    bins = best_fit(lengths, 50)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert sorted(50 - sum(lengths[i] for i in members) for members in bins) == quadratic_best_fit_room(
        lengths, 50
    )


def test_it_takes_the_tightest_bin() -> None:
    # 7 leaves 3, 6 leaves 4: the 3 goes to the first, the 4 to the second. First fit in the order given would
    # need three bins.
    lengths = [3, 6, 4, 7]
    assert {frozenset(members) for members in best_fit(lengths, 10)} == {frozenset({3, 0}), frozenset({1, 2})}


def test_a_hundred_thousand_documents_take_seconds_and_waste_little() -> None:
    generator = random.Random(0)
    lengths = [min(2048, max(1, int(generator.lognormvariate(5.5, 1)))) for _ in range(100_000)]
    start = time.perf_counter()
    bins = best_fit(lengths, 2048)
    assert time.perf_counter() - start < 60
    assert sum(lengths) / (len(bins) * 2048) > 0.99


@pytest.mark.parametrize("lengths", [[3, 11], [0]])
def test_what_cannot_be_packed_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="1 to 10"):
        best_fit(lengths, 10)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(20, 300), st.integers(1, 4))
def test_parts_within_a_budget_hold_everything_once_and_suit_the_ranks(
    lengths: list[int], budget: int, ranks: int
) -> None:
    parts = evenly(lengths, budget, ranks)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(parts) and max(sum(lengths[i] for i in part) for part in parts) <= max(budget, *lengths)
    assert len(parts) % ranks == 0 or len(parts) == len(lengths)
    assert evenly(lengths, budget, ranks) == parts


def test_parts_are_about_equally_full() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(100, 900) for _ in range(256)]
    loads = [sum(lengths[i] for i in part) for part in evenly(lengths, 16_384, 4)]
    assert len(loads) % 4 == 0 and max(loads) <= 16_384
    assert max(loads) - min(loads) < 0.01 * max(loads), "a rank would wait for another"


def test_passes_in_order_are_filled_by_the_lengths_of_what_they_hold() -> None:
    items = ["a" * n for n in (3, 5, 2, 9, 1, 12, 4)]
    parts = Passes(2, tokens=10).in_order(items, len)
    assert [[len(item) for item in part] for part in parts] == [
        [3, 5, 2],
        [9, 1],
        [12],
        [4],
    ], "one that is too long goes alone"
    assert [list(part) for part in Passes(3).in_order(items, len)] == [items[:3], items[3:6], items[6:]]
    assert len(Passes(2, tokens=10).in_order([], len)) == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 60), st.integers(1, 4))
def test_no_more_parts_than_trying_all_numbers_of_them(lengths: list[int], budget: int, ranks: int) -> None:
    budget, count = max(budget, *lengths), -(-sum(lengths) // max(budget, *lengths))
    while True:
        count = min(-(-count // ranks) * ranks, len(lengths))
        loads = [0] * count
        for length in sorted(lengths, reverse=True):
            loads[loads.index(min(loads))] += length
        if max(loads) <= budget or len(best_fit(lengths, budget)) == count:
            break
        count += 1
    assert len(evenly(lengths, budget, ranks)) == count


def test_documents_of_over_half_a_pass_are_dealt_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt = []
    monkeypatch.setattr(packing, "best_fit", lambda *of: dealt.append(of) or best_fit(*of))
    assert evenly([2100] * 2000, 4096, 1) == [[i] for i in range(2000)] and not dealt


def test_where_an_even_spread_needs_one_pass_more_they_are_filled_instead() -> None:
    lengths = [997, 837, 197] * 64  # 99 % of 8 passes
    loads = [sum(lengths[i] for i in part) for part in evenly(lengths, 16_384, 1)]
    assert len(loads) == 8 and max(loads) <= 16_384


def test_a_budget_lays_documents_in_one_row_and_rows_lays_one_in_each() -> None:
    documents = [Document([1] * n, [True] * n) for n in (3, 9, 4)]
    (one,) = Passes(2, tokens=16).split(documents, len)
    assert Passes(2, tokens=16).rows_of(one) == [one] and sum(map(len, one)) == 16
    assert Passes(2).split(documents, len) == [documents[:2], documents[2:]]
    assert Passes(2).rows_of(documents) == [[d] for d in documents]
    assert Passes(2, tokens=16).split([], len) == []


def test_attention_that_computes_whole_rows_gets_narrow_ones() -> None:
    """Consecutive documents share a row; the longest one may be wider than asked for, and then all rows."""

    def rows(lengths: list[int], width: int) -> list[list[int]]:
        documents = [Document([1] * length, [True] * length) for length in lengths]
        laid = Passes(2, tokens=99, width=width).rows_of(documents)
        assert [document for row in laid for document in row] == documents, "in their order"
        return [[len(document) for document in row] for row in laid]

    assert rows([3, 4, 1, 6, 2, 8], 8) == [[3, 4, 1], [6, 2], [8]]
    assert rows([3, 12, 4, 8, 1], 8) == [[3], [12], [4, 8], [1]]
    assert rows([], 8) == []


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(20, 300))
def test_rows_of_one_document_stay_within_the_budget_with_their_padding(
    lengths: list[int], budget: int
) -> None:
    documents = [Document([1] * length, [True] * length) for length in lengths]
    passes = Passes(1, budget, apart=True)
    for parts in (passes.split(documents, len), list(passes.in_order(documents, len))):
        assert sorted(len(document) for part in parts for document in part) == sorted(lengths)
        for part in parts:
            rows = passes.rows_of(part)
            assert all(len(row) == 1 for row in rows)
            assert len(rows) == 1 or len(rows) * max(len(row[0]) for row in rows) <= budget
    pair = Pair(Document([1] * 7, [True] * 7), Document([1] * 4, [True] * 4), 0.0)
    assert passes.row_tokens(pair) == 14 and Passes(1, budget).row_tokens(pair) == 11
