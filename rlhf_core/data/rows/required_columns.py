"""Checks that a source has the columns that a kind of stage needs, and suggests likely alternatives.
Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from rlhf_core.config import Source
from rlhf_core.data.rows.columns import Kind, Row

# Column names in published data sets, in addition to names that contain ours.
USUAL = {
    "prompt": ("question", "instruction", "input", "query"),
    "response": ("answer", "output", "completion"),
    "answer": ("solution", "reference", "target", "gold"),
}


def require_columns(source: Source, kind: Kind, columns: Sequence[str], row: Row) -> None:
    """Raises ValueError if a source lacks columns that this kind needs. `row` is its first row; `columns` are
    the columns of its first rows."""
    if kind == "sft":
        if source.messages_key in columns:
            return
        needed = {"prompt_key": source.prompt_key, "response_key": source.response_key}
        instead = f" (and no column {source.messages_key!r} with whole conversations, messages_key)"
    elif kind in ("answer", "scored") or (kind == "labelled" and source.label_key in columns):
        needed = {"prompt_key": source.prompt_key, "response_key": source.response_key}
        if kind == "scored":
            needed["reward_key"] = source.reward_key
        instead = ""
    elif kind in ("preference", "labelled"):
        needed = {"chosen_key": source.chosen_key, "rejected_key": source.rejected_key}
        if source.margin_key is not None:
            needed["margin_key"] = source.margin_key
        if isinstance(row.get(source.chosen_key), str):
            needed["prompt_key"] = source.prompt_key
        instead = (
            f" (and no column {source.label_key!r} that labels single answers, label_key)"
            if kind == "labelled"
            else ""
        )
    else:
        needed = {"prompt_key": source.prompt_key}
        instead = ""
    missing = {key: column for key, column in needed.items() if column not in columns}
    if missing:
        named = ", nor ".join(f"{column!r}" for column in missing.values())
        free = [column for column in columns if column not in needed.values()]
        settings = []
        for key, column in missing.items():
            settings.append(key_to_set(key, column, free))
            free = [other for other in free if settings[-1] != f"{key}: {other}"]
        raise ValueError(
            f"{source.path}: there is no column {named}{instead}; its columns are {', '.join(columns)}: set"
            f" {' and '.join(settings)} in this data source"
        )


def key_to_set(key: str, column: str, columns: Iterable[str]) -> str:
    """Returns `KEY: COLUMN` with the column that is probably meant, or only the key. `column` is the missing
    name."""
    names = {name.lower(): name for name in columns if not name.lower().endswith(("id", "ids"))}
    for word in dict.fromkeys((column.lower(), key.removesuffix("_key"))):
        usual = [name for part in (word, *USUAL.get(word, ())) for name in names if part in name]
        meant = [*usual, *difflib.get_close_matches(word, names, 1, 0.75)]
        if meant:
            return f"{key}: {names[meant[0]]}"
    return key
