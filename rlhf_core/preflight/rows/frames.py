"""Measures how many tokens the chat templates of a plan's stages add, and renders the stages' rows with them.
Does so in a process without torch if possible (see `template_length.py`), otherwise in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rlhf_core.config.data import Text
from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.vocabulary import tokenizer_place
from rlhf_core.preflight.rows.template_length import (
    MeasuredTemplate,
    Pair,
    RowsToRender,
    measure,
    measured,
    pair_of,
)
from rlhf_core.preflight.rows.template_rows import Rendered
from rlhf_core.recipe.plan import Node, Plan

Frames = dict[Pair, MeasuredTemplate | str]  # a string says why the tokenizer or template cannot be used


def frames_of(
    plan: Plan, nodes: Sequence[Node], start_of: Callable[[Node], str | None], broken: Collection[str]
) -> Frames:
    """Maps each (tokenizer, template) of the stages to the number of tokens that the template adds and the
    results of rendering the stages' rows.

    `start_of` returns the folder or Hub id of a stage's tokenizer. Tokenizers in `broken` are left out.
    """
    starts = {
        node.name: start for node in nodes if (start := start_of(node)) is not None and start not in broken
    }
    pairs: dict[Pair, dict[RowsToRender, None]] = {}
    for node in nodes:
        for text in node.config.texts if node.name in starts else ():
            rows = pairs.setdefault(pair_of(starts[node.name], text.data), {})
            if text.rows:
                rows[_rows_of(text)] = None
    trust = plan.recipe.trust_remote_code
    found = _frames_apart(pairs, trust) if trust or "transformers" not in sys.modules else {}
    return {
        pair: found[pair] if pair in found else _frame(pair, tuple(rows), trust)
        for pair, rows in pairs.items()
    }


def rendered(frame: MeasuredTemplate, text: Text) -> Rendered:
    """Returns the results of rendering the rows of a stage's data set with the template that `frame`
    measured."""
    return frame.rendered[_rows_of(text)] if text.rows else Rendered()


def _rows_of(text: Text) -> RowsToRender:
    assert text.rows is not None, "the stage checks it"
    # Other limits apply only to part of a row, such as the prompt of an evaluation's pairs.
    is_whole_row = text.limit_field == "max_len" or text.rows == "prompt"
    return RowsToRender(
        text.data.model_dump_json(), text.rows, text.limit_field, text.limit if is_whole_row else 0
    )


def _frames_apart(pairs: Mapping[Pair, Iterable[RowsToRender]], trust_remote_code: bool) -> Frames:
    """Works like `frames_of`, but only for pairs that a process without torch can read. Fetches tokenizers
    from the Hub."""
    found: Frames = {}
    folders: dict[Pair, Pair] = {}
    for pair in pairs:
        place = pair[0]
        try:
            folders[pair] = (tokenizer_place(place) if is_remote(place) else place, *pair[1:])
        except ValueError as error:
            found[pair] = str(error)
    local = {folder: tuple(pairs[pair]) for pair, folder in folders.items() if not is_remote(folder[0])}
    lengths = measured(local, trust_remote_code)
    return found | {pair: lengths[folder] for pair, folder in folders.items() if folder in lengths}


def _frame(pair: Pair, rows: Sequence[RowsToRender], trust_remote_code: bool) -> MeasuredTemplate | str:
    try:
        return measure(pair, rows, trust_remote_code)
    except ValueError as error:
        return str(error)
