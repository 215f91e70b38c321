"""Reads files and Hub data sets as rows with standard columns, one at a time, and mixes several sources.
Torch-free."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from rlhf_core.config import Data, Source
from rlhf_core.data.rows.arrow_padding import without_padding
from rlhf_core.data.rows.columns import READERS, Kind, Located, Row, tools_of
from rlhf_core.data.rows.formats import FORMATS, recognise
from rlhf_core.data.rows.required_columns import require_columns
from rlhf_core.data.rows.row_files import is_arrow, is_file, raw_rows

FIRST_ROWS = 8  # rows that determine the columns and the format
CHECKED_ROWS = 20_000  # rows of a file checked before a run; with rows of a kilobyte this takes 0.3 seconds


class Placed(NamedTuple):
    """Holds a row of a mixture: its place in the mixture's order, its source's index, its number in that
    source (from 1), and the row."""

    place: int
    source: int
    number: int
    located: Located


class Mixture(NamedTuple):
    """Describes which rows of each source a mixture uses, and their order.

    `places[s][r]` is the place of row r of source s, or -1 if the row is unused; `rows` is the number of used
    rows. `ended_by` is the source whose rows ran out and ended the mixture, or None if `max_samples` ended
    it. `left` is the number of unused rows of the other sources if a source ran out, otherwise 0.
    """

    places: list[array[int]]
    rows: int
    ended_by: int | None
    left: int


def load_rows(data: Data, seed: int, kind: Kind | None = None) -> list[Row]:
    """Returns all rows of a mixture, with their columns under the standard names (messages, prompt, response,
    chosen, rejected, margin).

    A single source keeps its order. Several sources are each shuffled with the seed. The source furthest
    behind its share then provides the next row. The mixture ends when that source has no rows left, because
    no row is used twice. Every prefix of the list therefore has the recipe's shares, even after
    `max_samples`, which is applied last. With a kind, rows that this kind of stage cannot use (rows without a
    preference) are left out. Raises ValueError for a missing, unreadable or empty file.
    """
    rows = sorted(placed_rows(data, seed, kind), key=lambda row: row.place)
    return [row.located.row for row in rows if not unusable(row.located, kind)]


def check_columns(data: Data, kind: Kind) -> None:
    """Reads the first rows of each source (see `checked_rows`). Raises ValueError, as a stage would, for a
    missing file, no rows, a missing column or an invalid row."""
    for located in checked_rows(data, kind):
        if not unusable(located, kind):
            READERS[kind](located)
            tools_of(located)


def checked_rows(data: Data, kind: Kind) -> Iterator[Located]:
    """Yields the rows that are checked before a run, including rows that a stage of this kind leaves out.
    These are the first CHECKED_ROWS rows of a single file, and only the first FIRST_ROWS rows of a Hub data
    set, which is not downloaded, or of a source of a mixture, which may not use later rows."""
    alone = len(data.sources) == 1
    for source in data.sources:
        first = CHECKED_ROWS if alone and is_file(source) else FIRST_ROWS
        yield from _read(source, kind, first, data.max_samples if alone else None)


def unusable(located: Located, kind: Kind | None) -> str:
    """Returns why a stage of this kind leaves a row out, or "" if it uses the row. A row is left out if it
    prefers no answer although the stage needs a preference."""
    needed = kind in ("preference", "labelled") and "label" not in located.row
    no_answer = (
        kind in ("sft", "answer", "scored")
        and located.row.get("messages") is None
        and located.row.get("response") is None
    )
    return located.no_preference if needed or no_answer else ""


def used_rows(data: Data, seed: int, kind: Kind) -> Iterator[Located]:
    """Yields all rows that a stage uses if all sources are files, otherwise the rows of `checked_rows`. Takes
    a second for about 65,000 one-kilobyte rows."""
    if all(map(is_file, data.sources)):
        yield from (placed.located for placed in placed_rows(data, seed, kind))
    else:
        yield from checked_rows(data, kind)


def placed_rows(data: Data, seed: int, kind: Kind | None, mixture: Mixture | None = None) -> Iterator[Placed]:
    """Yields the rows of the mixture one at a time, in the order of the files, each with its place in the
    mixture's order. Includes rows that `load_rows` leaves out as unusable.

    `mixture` is the result of `mixture_of`; it is computed if not passed.
    """
    mixture = mixture or mixture_of(data, seed)
    if mixture is None:
        for number, located in enumerate(_read(data.sources[0], kind, None, data.max_samples), start=1):
            yield Placed(number - 1, 0, number, located)
        return
    for index, source in enumerate(data.sources):
        places = mixture.places[index]
        for number, located in enumerate(_read(source, kind, None), start=1):
            if places[number - 1] >= 0:
                yield Placed(places[number - 1], index, number, located)


def mixture_of(data: Data, seed: int) -> Mixture | None:
    """Applies the mixture rule of `load_rows`, and reads all files once to count rows. Returns None for a
    single source.

    The result takes 8 bytes per row. Raises ValueError if a source, or the mixture itself, would have no
    rows.
    """
    if len(data.sources) == 1:
        return None
    orders = []
    places = []
    for index, source in enumerate(data.sources):
        order = array("q", range(sum(1 for _ in raw_rows(source, None))))
        if not order:
            raise _empty(source)
        random.Random(f"{seed}/{index}").shuffle(order)
        orders.append(order)
        places.append(array("q", [-1]) * len(order))
    shares = [source.probability for source in data.sources]
    taken = [0] * len(orders)
    count = 0
    ended_by = None
    while data.max_samples is None or count < data.max_samples:
        behind = [share * (count + 1) - used for share, used in zip(shares, taken, strict=True)]
        due = max((i for i in range(len(orders)) if shares[i] > 0), key=lambda i: behind[i])
        if taken[due] == len(orders[due]):
            ended_by = due
            break
        places[due][orders[due][taken[due]]] = count
        taken[due] += 1
        count += 1
    if not count:
        raise ValueError(f"{names(data)}: the mixture has no rows: the sources with a share have too few")
    left = sum(
        len(order) - used for order, used, share in zip(orders, taken, shares, strict=True) if share > 0
    )
    return Mixture(places, count, ended_by, left if ended_by is not None else 0)


def names(data: Data) -> str:
    """Returns the paths of all sources, for error messages."""
    return ", ".join(source.path for source in data.sources)


def _read(source: Source, kind: Kind | None, first: int | None, most: int | None = None) -> Iterator[Located]:
    """Yields the first `first` rows (None: all) of one source, at most `most`. Checks the columns in the
    first FIRST_ROWS rows and recognises the format."""
    rows = raw_rows(source, first)
    head = list(islice(rows, FIRST_ROWS))
    if not head:
        raise _empty(source)
    form = recognise(head[0]) if source.format == "auto" else source.format
    if kind is not None:
        standard = (
            [_located(source, form, number, row).row for number, row in enumerate(head, start=1)]
            if form != "columns"
            else []
        )
        require_columns(
            source, kind, list(dict.fromkeys(column for row in head + standard for column in row)), head[0]
        )
    for number, row in enumerate(islice(chain(head, rows), most), start=1):
        yield _located(source, form, number, row)


def _empty(source: Source) -> ValueError:
    inbox, taken, _ = source.path.rpartition(".inbox/taken/")
    if taken:
        return ValueError(
            f"{inbox}.inbox: has no (new) rows of the kind that this stage trains on: docs/how-to/feedback.md"
            " says which"
        )
    return ValueError(f"{source.path}: has no rows: give a data set with at least one")


def _located(source: Source, form: str, number: int, row: Row) -> Located:
    where = f"{source.path}, row {number}"
    folder = os.path.dirname(source.path) if is_file(source) else None
    standard = dict(row)
    for name in ("messages", "prompt", "response", "chosen", "rejected", "margin", "label", "reward"):
        key = getattr(source, f"{name}_key")
        if key in row:
            standard[name] = row[key]
        else:
            # the recipe names another column, so a column that has the standard name is not used
            standard.pop(name, None)
    if is_arrow(source):
        standard = without_padding(standard)
    if form == "columns":
        return Located(where, standard, folder=folder)
    made = FORMATS[form](where, row)
    own_margin = source.margin_key != "margin" or "margin" in row
    computed = {name: value for name, value in made.columns.items() if name != "margin" or not own_margin}
    return Located(where, standard | computed, made.no_preference, folder)
